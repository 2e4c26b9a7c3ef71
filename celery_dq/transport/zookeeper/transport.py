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
from typing import Any

from celery_dq.errors import AccessDenied, MissingLibrary, ZooKeeperUnreachable
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

from celery_dq.transport.broker_url import take_apart
from celery_dq.transport.threaded_transport import ThreadedTransport
from celery_dq.transport.zookeeper.address import (
    DEFAULT_PORT,
    host_list,
    no_server_listens,
    session_options,
)
from celery_dq.transport.zookeeper.channel import Channel as ZooKeeperChannel
from celery_dq.transport.zookeeper.fetcher import ZooKeeperFetcher
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ZooKeeperInFlight
from celery_dq.transport.zookeeper.publisher import ZooKeeperPublisher
from celery_dq.transport.zookeeper.queues import Bindings, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import count_steps
from celery_dq.transport.zookeeper.subscription import ZooKeeperSubscription
from celery_dq.znodes import PRESENCES, BrokerNodes
from celery_dq.zookeeper.item_locks import ItemLocks
from celery_dq.zookeeper.session import PinnedSession, Session, SessionState

#: Seconds without a connection after which the transport checks whether any server accepts connections.
FIRST_LOOK_S = 0.5
#: The wait for one answer while consuming, as a share of the session timeout.
ANSWER_SHARE = 2.0 / 3.0


class Transport(ThreadedTransport):
    """Kombu's entry to the ZooKeeper broker: one session for all channels of a connection."""

    Channel = ZooKeeperChannel
    driver_type = "zookeeper"
    driver_name = "kazoo"
    default_port = DEFAULT_PORT
    can_parse_url = True
    connection_errors = (
        *ThreadedTransport.connection_errors,
        ZooKeeperUnreachable,
        ConnectionLoss,
        SessionExpiredError,
        ConnectionClosedError,
        OperationTimeoutError,
    )
    #: Without this attribute, kombu raises at the second failure in a row, despite the retry policy.
    recoverable_connection_errors = connection_errors
    channel_errors = (*ThreadedTransport.channel_errors, KazooException, AccessDenied)
    implements = ThreadedTransport.implements.extend(batch_publish=True)
    supports_batch_publish = True
    unusable = ZooKeeperUnreachable
    _fetcher: ZooKeeperFetcher | None
    queues: ZooKeeperQueues

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        take_apart(client)
        nodes = BrokerNodes(self.options.environment)
        hosts = host_list(client.hostname or "localhost", client.port, client.virtual_host)
        self.session = Session(hosts, **session_options(client))
        self.queues = ZooKeeperQueues(self.session, nodes)
        self.bindings = Bindings(self.session, nodes)
        self.publisher = ZooKeeperPublisher(self.session, self.clock)
        self.in_flight = ZooKeeperInFlight("", lambda: None)

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
        return (
            self._fetcher is not None
            and self._fetcher.failure is not None
            and not self._fetcher.subscriptions
        )

    def close_connection(self, connection: Any) -> None:
        """Close all channels, requeue their messages, and end the session."""
        super().close_connection(connection)
        if self._owner.is_current:
            self.publisher.close()
        self.session.close()

    # -- consuming -----------------------------------------------------------------

    def new_fetcher(self) -> ZooKeeperFetcher:
        """Make the fetcher, whose items are locked by the present session."""
        session = PinnedSession(self.session)
        locks = ItemLocks(session, PRESENCES, timeout_s=session.timeout_s * ANSWER_SHARE, taking=count_steps)
        in_flight = self.in_flight = ZooKeeperInFlight(uuid.uuid4().hex, self.look_again)
        return ZooKeeperFetcher(session, locks, in_flight, self.clock, self.wake_delivery, self.queues.sweep)

    def subscribe(self, channel: Any, queue: str) -> ZooKeeperSubscription:
        """Make the subscription of a channel to a queue; nothing is taken yet."""
        wake = self.start_fetcher().wake  # with its own messages in flight
        leaderships = self._app_context.leaderships
        return ZooKeeperSubscription(
            queue,
            channel,
            self.queues.nodes(queue),
            self.in_flight,
            self.clock,
            wake,
            self.max_deliveries(queue),
            in_order=leaderships is not None and leaderships.is_singleton(queue),
        )

    def max_deliveries(self, queue: str) -> int:
        """How many consumers of a message may be lost before it is a dead letter; 0 means no limit."""
        return self.options.queue(queue).max_deliveries

    @property
    def worker(self) -> DiscardHandler | None:
        """The worker's handler of messages that will not run; None if this process is not a worker."""
        return self._app_context.discard_handler

    def claim_one(self, fetcher: ZooKeeperFetcher, queue: str) -> list[ClaimedItem]:
        """Take one message of *queue*, if one is available."""
        if not fetcher.is_connected:
            # Kazoo would keep the requests, and send them when they may not apply any more.
            self.session.open()
            fetcher.flush()
        if queue not in fetcher.visited:
            fetcher.visited[queue] = self.subscribe(None, queue)
        return fetcher.take_one(fetcher.visited[queue])
