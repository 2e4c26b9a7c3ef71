"""``dq-zookeeper://``.

Connection string::

    dq-zookeeper://[user:password@]host[:port][,host[:port]…][/chroot]

``user:password`` is a credential of the scheme ``digest``. Transport options: ``session_timeout`` (seconds,
default 10: how long a dead worker's messages stay with it), ``auth`` (pairs of scheme and credential),
``sasl`` (kazoo's ``sasl_options``), ``acl`` (kazoo's ACLs). TLS: ``broker_use_ssl`` with ``ca``,
``certfile``, ``keyfile``, ``verify_certs``, ``check_hostname``.

Features: direct, topic and fanout exchanges, priorities, ETA, remote control, batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery_dq.clock import SystemClock
from celery_dq.errors import AccessDenied, ConfigurationError, ZooKeeperUnreachable
from celery_dq.hooks import WIRES, Undertaker, Wires
from celery_dq.options import Options

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
    raise ImportError(
        "dq-zookeeper:// needs kazoo, which is not installed: pip install 'celery-dq[zookeeper]'"
    ) from error

from celery_dq.options.resolve import resolve
from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.zookeeper.address import (
    DEFAULT_PORT,
    address_in,
    host_list,
    nobody_listens,
    session_options,
)
from celery_dq.transport.zookeeper.bell import Bell
from celery_dq.transport.zookeeper.bindings import Bindings
from celery_dq.transport.zookeeper.channel import Channel as ZooKeeperChannel
from celery_dq.transport.zookeeper.fetcher import Fetcher
from celery_dq.transport.zookeeper.hand import Hand, Held
from celery_dq.transport.zookeeper.publisher import Publisher
from celery_dq.transport.zookeeper.queues import Queues
from celery_dq.transport.zookeeper.source import Source
from celery_dq.transport.zookeeper.talk import Talk
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session, State

#: Seconds after which it is asked whether anybody listens at all.
FIRST_LOOK_S = 0.5
#: Seconds after which the event loop gets a turn, although there is more to deliver.
ONE_TURN_S = 0.01
#: Seconds that ``drain_events`` waits in one go.
LONGEST_WAIT_S = 1.0


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
    #: Without these kombu takes a second failure in a row for good, whatever the retry policy says.
    recoverable_connection_errors = connection_errors
    channel_errors = (*VirtualTransport.channel_errors, KazooException, AccessDenied)
    implements = VirtualTransport.implements.extend(
        asynchronous=True, batch_publish=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    supports_batch_publish = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        _take_apart(client)
        self.clock = SystemClock()
        self._wires = _wires(client)
        self._options: Options = resolve({}) if self._wires is None else self._wires.options
        nodes = BrokerNodes(self._options.environment)
        hosts = host_list(client.hostname or "localhost", client.port, client.virtual_host)
        self.session = Session(hosts, **session_options(client))
        self.queues = Queues(self.session, nodes)
        self.bindings = Bindings(self.session, nodes)
        self.publisher = Publisher(self.session, self.clock)
        self.hand = Hand("", lambda: None)
        self._pid = os.getpid()
        self._talk: Talk | None = None
        self._fetcher: Fetcher | None = None
        self._bell: Bell | None = None
        self._sources: list[tuple[ZooKeeperChannel, Source]] = []
        #: Queues of which single messages were taken.
        self._visited: dict[str, Source] = {}
        self._loop: Any = None

    def driver_version(self) -> str:
        """The version of kazoo."""
        return str(kazoo.__version__)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL of the broker, without its password; urllib could not take it apart."""
        client = self.client
        credentials = ""
        if client.userid:
            credentials = f"{client.userid}:{client.password if include_password else mask}@"
        hosts = host_list(client.hostname or "localhost", client.port, client.virtual_host)
        return f"{client.transport_cls}://{credentials}{hosts}"

    # -- connecting ----------------------------------------------------------------

    def establish_connection(self) -> Any:
        """Connect.

        Raises:
            ZooKeeperUnreachable: Nobody answered in time.
            ConfigurationError: The server refused the credentials.
        """
        patience_s = float(self.client.connect_timeout or 5.0)
        try:
            try:
                self.session.open(min(FIRST_LOOK_S, patience_s))
            except ZooKeeperUnreachable:
                if nobody_listens(self.session.hosts):
                    raise
                self.session.open(patience_s)
        except BaseException:
            self.session.close()
            raise
        return super().establish_connection()

    def verify_connection(self, connection: Any) -> bool:
        """Whether it was not closed: a session outlives connections that break."""
        return self.session.state is not State.CLOSED

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Say no, or Celery does not reduce the prefetch count after a reconnect."""
        return False

    def refuse_inherited(self) -> None:
        """A forked child has inherited this connection.

        Raises:
            ZooKeeperUnreachable: This is that child.
        """
        if self._pid != os.getpid():
            raise ZooKeeperUnreachable(
                "This connection was opened before a fork: open a new one in the child process"
            )

    def close_connection(self, connection: Any) -> None:
        """Close all channels, give everything back, and end the session."""
        if self._pid == os.getpid():
            super().close_connection(connection)
            fetcher, self._fetcher = self._fetcher, None
            if fetcher is not None:
                fetcher.stop()
            self.publisher.close()
            if self._bell is not None:
                self._bell.close()
        self.session.close()

    # -- consuming -----------------------------------------------------------------

    def _consuming(self) -> Fetcher:
        if self._fetcher is None:
            talk = self._talk = Talk(self.session)
            bell = self._bell = Bell(talk.client.handler.event_object)
            hand = self.hand = Hand(talk.guid, self.look_again)
            self._fetcher = Fetcher(talk, hand, self.clock, self._room, bell.ring, self.queues.sweep)
            if self._loop is not None:
                bell.hang_on(self._loop, self._deliver_all)
            self._fetcher.start()
        return self._fetcher

    def look_again(self) -> None:
        """Something is to be told, or there may be room for more; from any thread."""
        if self._fetcher is not None:
            self._fetcher.ring()

    def _room(self, source: Source) -> int:
        for channel, each in self._sources:
            if each is source:
                return channel.room(source)
        return 0

    def consume(self, channel: ZooKeeperChannel, queue: str) -> Source:
        """Take from *queue* for *channel* from now on."""
        fetcher = self._consuming()
        source = self._source(queue, fetcher.ring)
        self._sources = [*self._sources, (channel, source)]
        fetcher.add(source)
        return source

    def _source(self, queue: str, ring: Callable[[], None]) -> Source:
        nodes, most = self.queues.nodes(queue), self.max_deliveries(queue)
        return Source(queue, nodes, self.hand, self.clock, ring, most)

    def max_deliveries(self, queue: str) -> int:
        """How often a message's consumer may be lost before it is given up on; 0: as often as it will."""
        return self._options.queue(queue).max_deliveries

    @property
    def undertaker(self) -> Undertaker | None:
        """Who does Celery's bookkeeping for what will not run, if this is a worker."""
        return None if self._wires is None else self._wires.undertaker

    def cancel(self, source: Source) -> None:
        """Take nothing more from *source*; what was taken and not delivered goes back."""
        self._sources = [each for each in self._sources if each[1] is not source]
        if self._fetcher is not None:
            self._fetcher.remove(source)
        source.close()
        self.flush()

    def take_one(self, queue: str) -> list[Held]:
        """Take one message of *queue* now, if there is one."""
        fetcher = self._consuming()
        source = self._visited.get(queue)
        if source is None:
            source = self._source(queue, lambda: None)
            self._visited[queue] = source
        return fetcher.take_now(source)

    def flush(self) -> None:
        """Wait until the broker was told what became of the messages."""
        if self._fetcher is not None:
            self._fetcher.flush()

    def leave(self, queue: str) -> None:
        """A channel uses a transient queue no longer."""
        used = any(channel.uses(queue) for channel in (*self.channels, *self._avail_channels))
        if self.session.state is State.CONNECTED and not used:
            try:
                self.queues.leave(queue)
            except self.connection_errors + self.channel_errors:
                # Whoever sweeps will find it.
                return

    # -- delivering ----------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Be driven by *loop* from now on."""
        self._loop = loop
        if self._bell is not None:
            self._bell.hang_on(loop, self._deliver_all)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message.

        Raises:
            TimeoutError: None came in `timeout` seconds.
            ZooKeeperUnreachable: The connection is of no use any more.
        """
        self.refuse_inherited()
        self._consuming()
        bell = self._bell
        assert bell is not None
        end = None if timeout is None else self.clock.monotonic() + timeout
        while not self._deliver_one():
            left = LONGEST_WAIT_S if end is None else end - self.clock.monotonic()
            if left <= 0:
                raise TimeoutError
            bell.wait(min(left, LONGEST_WAIT_S))

    def _deliver_one(self) -> bool:
        fetcher, talk = self._fetcher, self._talk
        if fetcher is None or talk is None:
            return False
        if fetcher.failure is not None:
            raise ZooKeeperUnreachable(str(fetcher.failure)) from fetcher.failure
        if not talk.holds:
            # Others may have by now what lies in the inboxes.
            return False
        for channel, source in self._sources:
            if channel.deliver_one(source):
                self._sources = [each for each in self._sources if each[1] is not source] + [
                    each for each in self._sources if each[1] is source
                ]
                if not source.inbox:
                    fetcher.ring()
                return True
        return False

    def _deliver_all(self) -> None:
        until = self.clock.monotonic() + ONE_TURN_S
        try:
            while self._deliver_one():
                if self.clock.monotonic() > until:
                    # The solo pool runs tasks in here: the loop must see in between that it is to stop.
                    assert self._bell is not None
                    self._bell.ring()
                    return
        except BaseException:
            # What the exception left behind must not wait for something else to come.
            if self._bell is not None and any(source.inbox for _, source in self._sources):
                self._bell.ring()
            raise


def _take_apart(client: Any) -> None:
    """Put the parts of the URL where kombu keeps them: only there it hides the password of what it shows."""
    if "://" in (client.hostname or ""):
        address = address_in(client.hostname)
        client.hostname = address.hosts
        client.virtual_host = address.chroot
        client.userid = client.userid or address.user
        client.password = client.password or address.password


def _wires(client: Any) -> Wires | None:
    wires = client.transport_options.get(WIRES)
    if wires is not None and not isinstance(wires, Wires):
        raise ConfigurationError(f"transport_options[{WIRES!r}] is celery-dq's own: remove {wires!r}")
    return wires
