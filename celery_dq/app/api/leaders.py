"""``app.dq.leaders``: the leaders of singleton queues and of other elections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.outbox import relay_leadership
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import fencing_token
from celery_dq.inspector.redis_values import Client, check_text
from celery_dq.inspector.workers import LeaderSnapshot, leader_snapshot
from celery_dq.shown import shell_word
from celery_dq.singleton.elections import Elections
from celery_dq.transport.redis.store.partition import Partition


class Leaders:
    """Reads the leaders from the server of ``dq_election``, or from the broker. Asks no worker."""

    def __init__(self, broker: BrokerAccess) -> None:
        self._app = broker.app
        self._broker = broker

    def __call__(self, *names: str) -> list[LeaderSnapshot]:
        """Read the leaders.

        Args:
            names: The leaderships. Default: the singleton queues of the app, the elected beat and the
                relays of ``dq_outbox`` if they ever had a leader, and all other leaderships that the server
                knows. A Redis has no list of them: there these are the queues that ever had a leader, and a
                ``Runner``'s leadership has to be named.

        Raises:
            ConfigurationError: Nothing holds elections: the broker cannot, and ``dq_election`` is not set.
        """
        for name in names:
            check_text("name", name)
        with self._elections() as elections:
            chosen = list(names) or self._known(elections)
            return [leader_snapshot(elections.candidate(name)) for name in chosen]

    def known(self) -> list[str]:
        """Return the names that a call without names reads."""
        with self._elections() as elections:
            return self._known(elections)

    def forget(self, name: str) -> bool:
        """End the singleton queue `name`, or another leadership; then any worker may consume the queue.

        A queue stays a singleton queue in the broker when it is taken out of ``dq_singleton_queues``, because
        another worker may have the setting. A later leader continues the fencing tokens of the queue.

        Returns:
            Whether there was such a leadership.

        Raises:
            InvalidRequest: A worker leads it, or is a candidate.
        """
        check_text("name", name)
        with self._elections() as elections:
            was_led = name in elections.led([name])
            # The server of the broker checks its own election together with the fence.
            is_elsewhere = was_led and (self._broker.options.election or not self._broker.serves_queues())
            if is_elsewhere:
                elections.require_vacant(name)
            if not self._broker.serves_queues():
                if was_led:
                    elections.forget(name)
                return was_led
            with self._broker.open(name) as (partitions, client):
                if not was_led and not any(fencing_token(each, client) for each in partitions):
                    return False
                with self._broker.audit.change(client, "leadership_forgotten", name):
                    for partition in partitions:
                        _end_fence(partition, client)
                    if is_elsewhere:
                        elections.forget(name)
        return True

    def _known(self, elections: Elections) -> list[str]:
        # These modules are a worker's and a beat's, and most programs with an app need neither.
        from celery_dq.beat.scheduler import leadership, schedule_name
        from celery_dq.worker.singleton import singleton_queues

        options = self._broker.options
        beat = leadership(schedule_name(self._app, options))
        ours = self._broker.serves_queues() or self._broker.is_zookeeper()
        queues = self._broker.queue_names() if ours else self._app.amqp.queues
        relays = [relay_leadership(self._app, each) for each in options.outbox.databases]
        led = elections.led([*queues, beat, *relays])
        return sorted({*singleton_queues(self._app, options), *led})

    @contextmanager
    def _elections(self) -> Iterator[Elections]:
        with ExitStack() as stack:
            redis_client = None
            if not self._broker.options.election and self._broker.serves_queues():
                channel = stack.enter_context(self._broker.channel())
                redis_client = lambda: channel.client  # noqa: E731 - one line
            elections = Elections(self._broker.options, "celery dq", redis_client, "celery dq leaders")
            yield stack.enter_context(closing(elections))


def refuse_singleton(first: Partition, client: Client, reason: str) -> None:
    """Refuse a change that only an ordinary queue allows.

    Args:
        first: The first partition of the queue; a singleton queue has no other one.
        client: A redis client.
        reason: A clause that says why.

    Raises:
        InvalidRequest: The queue has had a leader, whatever the settings of this program say.
    """
    if fencing_token(first, client):
        queue = first.keys.queue
        raise InvalidRequest(
            f"{queue!r} is a singleton queue, {reason}: stop its workers, and make it an ordinary queue with "
            f"celery dq leaders {shell_word(queue)} --forget"
        )


def _end_fence(partition: Partition, client: Client) -> None:
    while True:
        ended = partition.fence(0).run(client)
        if not ended.accepted:
            raise InvalidRequest(
                f"a worker leads {partition.name!r}: stop the workers that have it in dq_singleton_queues, "
                "or take it out of their settings and restart them; nothing was changed"
            )
        if not ended.remaining:
            return
