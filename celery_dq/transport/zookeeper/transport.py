"""The kombu transport of ``dq-zookeeper://``.

Connection string::

    dq-zookeeper://[user:password@]host[:port][,host[:port]…][/chroot]

``user:password`` is a credential of the scheme ``digest``. Transport options: ``session_timeout`` (seconds,
default 10: the time until the messages of a dead worker are available again), ``auth`` (pairs of scheme and
credential), ``sasl`` (kazoo's ``sasl_options``), ``acl`` (kazoo's ACLs). TLS: ``broker_use_ssl`` with ``ca``,
``certfile``, ``keyfile``, ``verify_certs``, ``check_hostname``.

Features: direct, topic and fanout exchanges, priorities, ETA, remote control, batches.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from celery_dq.clock import SystemClock
from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import AccessDenied, ConfigurationError, MissingLibrary, ZooKeeperUnreachable
from celery_dq.options import Options
from celery_dq.per_process import OwnerProcess
from celery_dq.protocols import DiscardHandler

try:
    import kazoo
    from kazoo.exceptions import (
        ConnectionClosedError,
        ConnectionLoss,
        KazooException,
        OperationTimeoutError,
        SessionExpiredError,
    )
except ImportError as error:
    # kombu hides the text of a ValueError, which MissingLibrary is.
    raise ImportError(str(MissingLibrary.needed_by("dq-zookeeper://", "kazoo", "zookeeper"))) from error

from celery_dq.options.resolve import resolve
from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.host_list import take_apart
from celery_dq.transport.zookeeper.address import (
    DEFAULT_PORT,
    host_list,
    no_server_listens,
    session_options,
)
from celery_dq.transport.zookeeper.bindings import Bindings
from celery_dq.transport.zookeeper.channel import Channel as ZooKeeperChannel
from celery_dq.transport.zookeeper.delivery_count import count_steps
from celery_dq.transport.zookeeper.fetcher import ZooKeeperFetcher
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ZooKeeperInFlight
from celery_dq.transport.zookeeper.publisher import ZooKeeperPublisher
from celery_dq.transport.zookeeper.queues import ZooKeeperQueues
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription
from celery_dq.waker import Waker
from celery_dq.znodes import PRESENCES, BrokerNodes
from celery_dq.zookeeper.item_locks import ItemLocks
from celery_dq.zookeeper.session import PinnedSession, Session, SessionState

#: Seconds without a connection after which the transport checks whether any server accepts connections.
FIRST_LOOK_S = 0.5
#: Seconds of delivery after which control returns to the event loop.
ONE_TURN_S = 0.01
#: Maximum seconds of one wait in ``drain_events``.
LONGEST_WAIT_S = 1.0
#: The wait for one answer while consuming, as a share of the session timeout.
ANSWER_SHARE = 2.0 / 3.0


class Transport(VirtualTransport):
    """Kombu's entry to the ZooKeeper broker: one session for all channels of a connection."""

    Channel = ZooKeeperChannel
    driver_type = "zookeeper"
    driver_name = "kazoo"
    default_port = DEFAULT_PORT
    can_parse_url = True
    connection_errors = (
        *VirtualTransport.connection_errors,
        ZooKeeperUnreachable,
        ConnectionLoss,
        SessionExpiredError,
        ConnectionClosedError,
        OperationTimeoutError,
    )
    #: Without this attribute, kombu raises at the second failure in a row, despite the retry policy.
    recoverable_connection_errors = connection_errors
    channel_errors = (*VirtualTransport.channel_errors, KazooException, AccessDenied)
    implements = VirtualTransport.implements.extend(
        asynchronous=True, batch_publish=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    supports_batch_publish = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        take_apart(client)
        self.clock = SystemClock()
        self._app_context = _app_context_of(client)
        self._options: Options = resolve({}) if self._app_context is None else self._app_context.options
        nodes = BrokerNodes(self._options.environment)
        hosts = host_list(client.hostname or "localhost", client.port, client.virtual_host)
        self.session = Session(hosts, **session_options(client))
        self.queues = ZooKeeperQueues(self.session, nodes)
        self.bindings = Bindings(self.session, nodes)
        self.publisher = ZooKeeperPublisher(self.session, self.clock)
        self.in_flight = ZooKeeperInFlight("", lambda: None)
        self._owner = OwnerProcess()
        self._consuming_session: PinnedSession | None = None
        self._fetcher: ZooKeeperFetcher | None = None
        self._waker = Waker(self._deliver_all)
        #: Set at each wake-up, for `drain_events`; None until the connection consumes.
        self._woken: Any = None
        self._sources: list[tuple[ZooKeeperChannel, ZooKeeperSubscription]] = []
        #: Queues of which single messages were taken.
        self._visited: dict[str, ZooKeeperSubscription] = {}
        self._loop: Any = None

    def driver_version(self) -> str:
        """The version of kazoo."""
        return str(kazoo.__version__)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL of the broker with a masked password; urllib cannot parse a list of hosts."""
        client = self.client
        credentials = ""
        if client.userid:
            credentials = f"{client.userid}:{client.password if include_password else mask}@"
        hosts = host_list(client.hostname or "localhost", client.port, client.virtual_host)
        return f"{client.transport_cls}://{credentials}{hosts}"

    # -- connecting ----------------------------------------------------------------

    def establish_connection(self) -> Any:
        """Open the session.

        Raises:
            ZooKeeperUnreachable: No server answered within ``broker_connection_timeout``.
            ConfigurationError: The server refused the credentials.
        """
        if self._has_failed_idle():
            self.close_connection(self)
        patience_s = float(self.client.connect_timeout or 5.0)
        try:
            try:
                self.session.open(min(FIRST_LOOK_S, patience_s))
            except ZooKeeperUnreachable:
                if no_server_listens(self.session.hosts):
                    raise
                self.session.open(patience_s)
        except BaseException:
            self.session.close()
            raise
        return super().establish_connection()

    def verify_connection(self, connection: Any) -> bool:
        """Whether the connection can be used; a session outlives a broken TCP connection.

        A connection with an expired session raises in its consumers. If it has no consumers, it counts as
        closed, and kombu connects again before the next use.
        """
        return self.session.state is not SessionState.CLOSED and not self._has_failed_idle()

    def _has_failed_idle(self) -> bool:
        return self._fetcher is not None and self._fetcher.failure is not None and not self._sources

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Return False: otherwise Celery does not reduce the prefetch count after a reconnect."""
        return False

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork.

        Raises:
            ZooKeeperUnreachable: This process did not open the connection.
        """
        if not self._owner.is_current:
            raise ZooKeeperUnreachable(
                "This connection was opened before a fork: open a new one in the child process"
            )

    def close_connection(self, connection: Any) -> None:
        """Close all channels, requeue their messages, and end the session."""
        if self._owner.is_current:
            super().close_connection(connection)
            fetcher, self._fetcher = self._fetcher, None
            if fetcher is not None:
                fetcher.stop()
            self.publisher.close()
            self._waker.close()
            self._visited = {}
        self.session.close()

    # -- consuming -----------------------------------------------------------------

    def _consuming(self) -> ZooKeeperFetcher:
        if self._fetcher is None:
            session = self._consuming_session = PinnedSession(self.session)
            locks = ItemLocks(
                session, PRESENCES, timeout_s=session.timeout_s * ANSWER_SHARE, taking=count_steps
            )
            self._woken = session.client.handler.event_object()
            in_flight = self.in_flight = ZooKeeperInFlight(uuid.uuid4().hex, self.look_again)
            self._fetcher = ZooKeeperFetcher(
                session, locks, in_flight, self.clock, self._room, self._wake, self.queues.sweep
            )
            self._attach()
            self._fetcher.start()
        return self._fetcher

    def _wake(self) -> None:
        """Wake the delivery; callable from any thread."""
        self._woken.set()
        self._waker.wake()

    def _attach(self) -> None:
        if self._loop is not None:
            self._waker.attach(self._loop)
            # Deliver messages that arrived before the loop was attached.
            self._waker.wake()

    def look_again(self) -> None:
        """Wake the fetcher, to send acknowledgements or take more messages; callable from any thread."""
        if self._fetcher is not None:
            self._fetcher.wake()

    def _room(self, source: ZooKeeperSubscription) -> int:
        for channel, each in self._sources:
            if each is source:
                return channel.room(source)
        return 0

    def consume(self, channel: ZooKeeperChannel, queue: str) -> ZooKeeperSubscription:
        """Start to take messages from *queue* for *channel*."""
        fetcher = self._consuming()
        source = self._source(queue, fetcher.wake)
        self._sources = [*self._sources, (channel, source)]
        fetcher.add(source)
        return source

    def _source(self, queue: str, wake: Callable[[], None]) -> ZooKeeperSubscription:
        nodes, most = self.queues.nodes(queue), self.max_deliveries(queue)
        return ZooKeeperSubscription(queue, nodes, self.in_flight, self.clock, wake, most)

    def max_deliveries(self, queue: str) -> int:
        """How many consumers of a message may be lost before it is a dead letter; 0 means no limit."""
        return self._options.queue(queue).max_deliveries

    @property
    def discard_handler(self) -> DiscardHandler | None:
        """The worker's handler of messages that will not run; None if this process is no worker."""
        return None if self._app_context is None else self._app_context.discard_handler

    def cancel(self, source: ZooKeeperSubscription) -> None:
        """Stop taking from *source*, and requeue its messages that were not delivered."""
        self._sources = [each for each in self._sources if each[1] is not source]
        if self._fetcher is not None:
            self._fetcher.remove(source)
        source.close()
        self.flush()

    def take_one(self, queue: str) -> list[ClaimedItem]:
        """Take one message of *queue* now; an empty list if none is available."""
        fetcher = self._consuming()
        source = self._visited.get(queue)
        if source is None:
            source = self._source(queue, lambda: None)
            self._visited[queue] = source
        return fetcher.take_now(source)

    def flush(self) -> None:
        """Wait until the broker has confirmed the acknowledgements."""
        if self._fetcher is not None:
            self._fetcher.flush()

    def leave(self, queue: str) -> None:
        """End a channel's use of a transient queue; the queue is deleted with its last use."""
        used = any(channel.uses(queue) for channel in (*self.channels, *self._avail_channels))
        if self.session.state is SessionState.CONNECTED and not used:
            try:
                self.queues.leave(queue)
            except self.connection_errors + self.channel_errors:
                # A sweep deletes the queue later.
                return

    # -- delivering ----------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver messages in the event loop *loop* from now on."""
        self._loop = loop
        if self._fetcher is not None:
            self._attach()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message.

        Raises:
            TimeoutError: No message came within `timeout` seconds.
            ZooKeeperUnreachable: The session has ended; a new connection is needed.
        """
        self.refuse_inherited()
        self._consuming()
        end = None if timeout is None else self.clock.monotonic() + timeout
        while not self._deliver_one():
            left = LONGEST_WAIT_S if end is None else end - self.clock.monotonic()
            if left <= 0:
                raise TimeoutError
            self._woken.wait(min(left, LONGEST_WAIT_S))
            self._woken.clear()

    def _deliver_one(self) -> bool:
        fetcher, session = self._fetcher, self._consuming_session
        if fetcher is None or session is None:
            return False
        if fetcher.failure is not None:
            raise ZooKeeperUnreachable(str(fetcher.failure)) from fetcher.failure
        if not session.is_connected:
            # Other consumers may hold the messages in the inboxes by now.
            return False
        for channel, source in self._sources:
            if channel.deliver_one(source):
                self._sources = [each for each in self._sources if each[1] is not source] + [
                    each for each in self._sources if each[1] is source
                ]
                if not source.inbox:
                    fetcher.wake()
                return True
        return False

    def _deliver_all(self) -> None:
        until = self.clock.monotonic() + ONE_TURN_S
        try:
            while self._deliver_one():
                if self.clock.monotonic() > until:
                    # The solo pool runs tasks in this call: between them, the loop must notice a shutdown.
                    self._wake()
                    return
        except BaseException:
            # Deliver the remaining messages without waiting for the next event.
            if any(source.inbox for _, source in self._sources):
                self._wake()
            raise


def _app_context_of(client: Any) -> AppContext | None:
    context = client.transport_options.get(APP_CONTEXT)
    if context is not None and not isinstance(context, AppContext):
        raise ConfigurationError(
            f"transport_options[{APP_CONTEXT!r}] = {context!r} is set by celery-dq: remove it"
        )
    return context
