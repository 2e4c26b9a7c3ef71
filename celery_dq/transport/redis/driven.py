"""What the poller asks of a channel: to send what is due, and to read what has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.transport.redis.address import socket_options
from celery_dq.transport.redis.bases import RedisChannel

if TYPE_CHECKING:
    from celery_dq.transport.redis.intake import Intake
    from celery_dq.transport.redis.poller import Poller
    from celery_dq.transport.redis.process import Process
    from celery_dq.transport.redis.session import Session

#: Seconds between two health checks of the PUB/SUB connection.
HEALTH_CHECK_SECONDS = 25.0


class DrivenChannel(RedisChannel):
    """The half of a channel that an event loop or ``drain_events`` drives."""

    intake: Intake
    process: Process
    poller: Poller
    _subscribed: set[str]
    _health_checked_at: float
    _broken: bool
    session: Session

    def _separate(self) -> None:
        """Keep the broadcasts and bindings of another environment or prefix apart."""
        prefix = self.session.broadcast_prefix
        if prefix:
            # Kombu takes what stands before the first dot off again, and formats both.
            self.fanout_prefix = "/{db}/" + prefix.replace(".", "_") + "."
            self.keyprefix_queue = prefix.replace("%", "%%") + self.keyprefix_queue
            self.keyprefix_binding_permanent = prefix.replace("%", "%%") + "_kombu.binding_permanent.%s"
            self.keyprefix_binding_deadlines = prefix + "_kombu.binding_deadlines"

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        params = super()._connparams(asynchronous)
        return {**params, **socket_options(self.connection.client.hostname)}

    def tick(self) -> None:
        """Send what is due; see :class:`~celery_dq.transport.redis.fetcher.Fetcher`."""
        if self.active_fanout_queues - self._subscribed:
            self._subscribe()
        if self._subscribed:
            self._check_health()
        self.follow_terms()
        fetcher = self.intake.live_fetcher
        if fetcher is not None:
            try:
                fetcher.tick()
            except self.connection_errors:
                self._lose()
                raise

    def follow_terms(self) -> None:
        """Let the next messages of led queues go; see :class:`~celery_dq.transport.redis.lanes.Lanes`."""
        if self.intake.lanes is not None:
            try:
                self.intake.lanes.follow()
            except self.connection_errors:
                self._lose()
                raise

    def _subscribe(self) -> None:
        topics = [self._get_subscribe_topic(queue) for queue in self.active_fanout_queues]
        if hasattr(self, "_get_subscribe_topics"):
            topics = [
                topic for queue in self.active_fanout_queues for topic in self._get_subscribe_topics(queue)
            ]
        self.subclient.psubscribe(*topics)
        self._in_listen = self.subclient.connection
        self._subscribed = set(self.active_fanout_queues)

    def _check_health(self) -> None:
        now = self.process.clock.monotonic()
        if now - self._health_checked_at < HEALTH_CHECK_SECONDS:
            return
        self._health_checked_at = now
        if self.subclient.health_check_response_counter > 1:
            raise redis.ConnectionError(
                "The PUB/SUB connection does not answer its health checks: it is dead"
            )
        self.subclient.check_health()

    def connections(self) -> Iterator[tuple[str, Any]]:
        """The connections to be watched, with what is read from them."""
        fetcher = self.intake.live_fetcher
        if fetcher is not None:
            yield from fetcher.connections()
        if self._in_listen:
            yield "broadcasts", self._in_listen

    def on_readable(self, fd: int, kind: str, deliver: bool) -> bool:
        """Read what has arrived; return whether a broadcast was delivered."""
        try:
            if kind == "broadcasts":
                return bool(self._receive())
            served = self.intake.fetcher.on_readable(fd)
        except self.connection_errors:
            self._lose()
            raise
        if deliver:
            # What was claimed of a led queue goes into the inbox.
            self.follow_terms()
        if deliver and self.has_inbox:
            # Ask for the next batch before this one is worked on, so that neither side waits.
            self.tick()
            self.intake.deliver_all()
        return served

    def _lose(self) -> None:
        self._broken = True
        if self.intake.live_fetcher is not None:
            self.intake.live_fetcher.close()

    def hear_out(self) -> None:
        """Read what is on its way, where no loop is going to."""
        fetcher = self.intake.live_fetcher
        if fetcher is not None:
            self._where_no_loop_turns(fetcher.hear_out)

    def speak_out(self) -> None:
        """Tell what there is to tell, where no loop is going to."""
        self._where_no_loop_turns(self._tell)

    def _where_no_loop_turns(self, talk: Callable[[], None]) -> None:
        if not (self._broken or self._loop_turns):
            try:
                talk()
            except self.connection_errors:
                # The keeper will see to it.
                self._lose()

    def tell_now(self) -> None:
        """Where no loop turns, tell the broker at once what the ledger has for it.

        Raises:
            redis.RedisError: the broker did not answer; the ledger keeps what was not told.
        """
        if self.closed or self.connection is None:
            self.process.keeper.tell_soon()
        elif not self.poller.driven:
            self._tell()
        else:
            self._tell_at_the_end()

    def _tell_at_the_end(self) -> None:
        """Where the loop does not turn any more, for the worker stops, leave the telling to the keeper."""
        # Other tasks may run on, and a broker that does not answer must not keep them waiting.
        if self.poller.driven and not self._loop_turns:
            self.process.keeper.tell_soon()

    def _tell(self) -> None:
        for key in self.process.ledger.pending():
            queue = self.process.keeper.queue(key)
            if queue is not None:
                self.process.keeper.tell(queue, self.client)

    @property
    def _loop_turns(self) -> bool:
        # A worker that shuts down leaves its loop, and what is on its way then would never be read.
        gate = self.session.gate
        return self.poller.driven and not (gate is not None and gate.closing)

    def deliver_one(self) -> bool:
        """Deliver one claimed message, if there is one; return whether somebody got it."""
        return self.intake.has_undelivered and self.intake.deliver_one()

    @property
    def has_inbox(self) -> bool:
        """Claimed messages wait for ``drain_events``, or delivered ones for their turn, which has come."""
        return self.intake.has_undelivered or self.intake.has_next

    @property
    def expects_answer(self) -> bool:
        """A script is on its way."""
        fetcher = self.intake.live_fetcher
        return fetcher is not None and fetcher.expects_answer

    def next_deadline(self) -> float | None:
        """Return the monotonic time of the next appointment, if there is one."""
        fetcher = self.intake.live_fetcher
        return None if fetcher is None else fetcher.next_deadline()

    def tell_at_end_of_batch(self) -> None:
        """``drain_events`` returns: send acknowledgements off, unless more are about to come."""
        fetcher = self.intake.live_fetcher
        if fetcher is not None and not self.has_inbox and not self.closed:
            fetcher.teller.send_untold(self.process.clock.monotonic())

    def has_token(self) -> bool:
        """Return whether a token lies unclaimed in a consumed partition; called by the keeper.

        A led queue does not count: it waits for the message that runs, or for a retry to be due.
        """
        queues = [source.queue for source in self.intake.sources() if not source.queue.token]
        return any(self.process.keeper.waits_for_somebody(queue) for queue in queues)

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_listen is connection:
            self._in_listen = None
            self._subscribed.clear()
        if self.connection is not None:
            self.poller.forget_connection(connection)
