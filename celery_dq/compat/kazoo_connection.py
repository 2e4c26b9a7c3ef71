"""A kazoo connection that leaves unresponsive servers and can return to servers that have lost data.

kazoo measures the time since it last *sent* something. A client that sends requests more often than pings are
due never notices a dead server. The rules here measure the time since something was *received*, in shares of
the session timeout:

* The client leaves a server that owes an answer and has sent nothing for a fifth of the session timeout.
* A server that accepts a connection has a twelfth of the session timeout for each answer of the handshake.
  The time doubles with every round in which no server accepted the client, up to a fifth.
* The server that was left last is tried last.
* A client whose handshakes get no answer for a session timeout connects as a new client. The handshakes may
  arrive: each one would keep the old session alive, so that no other client gets its locks or leaderships.
* A client that no server has accepted for two session timeouts forgets the latest change that it has seen. A
  server that was rebuilt, or restored from an older backup, refuses clients that have seen later changes.

kazoo logs each failed attempt as a warning. Here these records have the level DEBUG, and the caller hears of
each round in which no server accepted the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kazoo.client import KazooClient, _prefix_root
from kazoo.exceptions import ConnectionDropped, SessionExpiredError
from kazoo.protocol.connection import ConnectionHandler
from kazoo.retry import ForceRetryError, KazooRetry
from kazoo.security import CREATOR_ALL_ACL
from kombu.utils.compat import detect_environment

from celery_dq.clock import SystemClock
from celery_dq.compat.guard import check
from celery_dq.shown import shown_logger

__all__ = ["Address", "new_client", "path_of", "send_request", "session_id_of"]

check("kazoo_connection")

logger = shown_logger(__name__)

Address = tuple[str, int]

#: Seconds that one TCP connect may take.
CONNECT_TIMEOUT_S = 2.0
#: Maximum seconds between two attempts to connect.
LONGEST_PAUSE_S = 1.0
#: Maximum silence of a server that owes an answer, as a share of the session timeout.
LONGEST_SILENCE = 1 / 5
#: Time for each answer of the handshake, as a share of the session timeout.
HANDSHAKE = 1 / 12
#: Number of session timeouts without a connection after which the latest change seen is forgotten.
FORGET_AFTER = 2.0
#: kazoo's read timeout, as a share of the session timeout.
READ_SHARE = 2.0 / 3.0
#: Minimum seconds of a ``select``; gevent does not check the sockets at all with a timeout of 0.
GLANCE_S = 0.001


def new_client(
    hosts: str,
    *,
    timeout_s: float,
    auth: Sequence[tuple[str, str]],
    sasl: Mapping[str, Any] | None,
    tls: Mapping[str, Any] | None,
    acl: Sequence[Any] | None,
    on_connected: Callable[[Any, float], None],
    on_failure: Callable[[Any, Address, Exception], Exception],
    on_unreachable: Callable[[], None],
) -> Any:
    """Create a kazoo client; the caller starts it.

    Args:
        hosts: As for :class:`~celery_dq.zookeeper.session.Session`.
        timeout_s: As for :class:`~celery_dq.zookeeper.session.Session`.
        auth: As for :class:`~celery_dq.zookeeper.session.Session`.
        sasl: As for :class:`~celery_dq.zookeeper.session.Session`.
        tls: As for :class:`~celery_dq.zookeeper.session.Session`.
        acl: As for :class:`~celery_dq.zookeeper.session.Session`.
        on_connected: Called with the client and the negotiated session timeout in seconds.
        on_failure: Called with the client, an address and the error of an attempt to connect to it. Returns
            the error that kazoo receives.
        on_unreachable: Called after each round over all servers in which none accepted the client.
    """
    handler = _bounded_handler()
    options: dict[str, Any] = {}
    if acl:
        options["default_acl"] = acl
    elif auth or sasl:
        options["default_acl"] = CREATOR_ALL_ACL
    if tls is not None:
        options.update({"use_ssl": True, "verify_certs": True, "check_hostname": True, **tls})
    client = KazooClient(
        hosts=hosts,
        timeout=timeout_s,
        handler=handler,
        auth_data=auth or None,
        connection_retry=KazooRetry(
            max_tries=-1,
            delay=0.1,
            backoff=2,
            max_delay=LONGEST_PAUSE_S,
            sleep_func=handler.sleep_func,
        ),
        command_retry=KazooRetry(max_tries=1, ignore_expire=False, sleep_func=handler.sleep_func),
        logger=_AttemptLogger(logging.getLogger("kazoo.client"), {}),
        **options,
    )
    sasl_options = dict(sasl) if sasl else None
    client._connection = WatchedConnection(client, sasl_options, on_connected, on_failure, on_unreachable)
    return client


def session_id_of(client: Any) -> int | None:
    """Return the id of a client's session; None before the first."""
    number: int | None = client._session_id
    return number


def path_of(client: Any, path: str) -> str:
    """Return the path below the chroot of a client."""
    whole: str = _prefix_root(client.chroot, path)
    return whole


def send_request(client: Any, request: Any, result: Any) -> None:
    """Send a request of a kind that kazoo does not know; `result` gets the answer."""
    client._call(request, result)


class _AttemptLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # no subscript before Python 3.11
    """Logs at level DEBUG what kazoo logs as a warning: the end of each connection and of each attempt."""

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log at level DEBUG."""
        self.debug(msg, *args, **kwargs)


class WatchedConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo ships no types
    """The connection of one client."""

    def __init__(
        self,
        client: Any,
        sasl_options: dict[str, Any] | None,
        on_connected: Callable[[Any, float], None],
        on_failure: Callable[[Any, Address, Exception], Exception],
        on_unreachable: Callable[[], None],
    ) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=client.logger, sasl_options=sasl_options)
        self._on_connected = on_connected
        self._on_failure = on_failure
        self._on_unreachable = on_unreachable
        self._clock = SystemClock()
        self._session_s = client._session_timeout / 1000.0
        self._patience_s = self._session_s
        #: Start of the current silence: an answer is due and nothing was received since.
        self._silent_since: float | None = None
        #: Time of the first failed attempt since the last connection.
        self._lost_at: float | None = None
        #: Time of the first handshake without an answer since the last connection.
        self._unheard_since: float | None = None
        #: Rounds over all servers since the last connection.
        self._rounds = 0
        self._in_handshake = False
        #: Whether a server has accepted the client in the current round.
        self._was_accepted = False
        self._left_at: dict[Address, float] = {}
        self.handler.watch = self._select

    # -- choice of the server

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        # kazoo has shuffled the hosts, and a stable sort keeps that order for hosts that were never tried.
        return sorted(super()._expand_client_hosts(), key=lambda each: self._left_at.get(each[1:], 0.0))

    def _connect_loop(self, retry: Any) -> Any:
        self._was_accepted = False
        try:
            return super()._connect_loop(retry)
        except ForceRetryError:
            if not self._was_accepted:
                self._on_unreachable()
            raise
        finally:
            self._rounds += 1

    def _connect_attempt(self, host: str, hostip: str, port: int, retry: Any) -> Any:
        try:
            return super()._connect_attempt(host, hostip, port, retry)
        finally:
            self._left_at[hostip, port] = self._clock.monotonic()

    # -- the handshake

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self._end_unheard_session()
        self._silent_since = None
        self._in_handshake = True
        self._patience_s = self._session_s * min(HANDSHAKE * 2**self._rounds, LONGEST_SILENCE)
        self._forget_in_time()
        try:
            answer = super()._connect(host, hostip, port)
        except Exception as error:
            reported = self._on_failure(self.client, (hostip, port), error)
            if reported is error:
                raise
            raise reported from error
        finally:
            self._in_handshake = False
        self._lost_at, self._unheard_since, self._rounds, self._was_accepted = None, None, 0, True
        self._session_s = answer[0] / READ_SHARE / 1000.0
        self._patience_s = self._session_s * LONGEST_SILENCE
        self._on_connected(self.client, self._session_s)
        return answer

    def _end_unheard_session(self) -> None:
        since = self._unheard_since
        if since is None or not self.client._session_id:
            return
        unheard_s = self._clock.monotonic() - since
        if unheard_s > self._session_s:
            self._unheard_since = None
            # kazoo treats this as the answer of a server that the session has expired.
            raise SessionExpiredError(f"no handshake was answered for {unheard_s:.1f} s")

    def _forget_in_time(self) -> None:
        now = self._clock.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        away_s = now - self._lost_at
        if self.client.last_zxid and away_s > FORGET_AFTER * self._session_s:
            logger.warning(
                "ZooKeeper at %s has accepted no connection of this process for %.0f s. From now on, the "
                "process connects as a client that has seen no changes, because servers that were rebuilt or "
                "restored refuse other clients.",
                ",".join(f"{host}:{port}" for host, port in self.client.hosts),
                away_s,
                extra={"event": "zookeeper_zxid_forgotten"},
            )
            self.client.last_zxid = 0

    # -- waiting

    def _select(
        self, select: Any, readable: list[Any], writable: list[Any], broken: list[Any], timeout: float
    ) -> Any:
        """Wait for sockets as kazoo asks, but not longer than the allowed silence of the server."""
        if writable:
            ready = select(readable, writable, broken, min(timeout, self._patience_s))
            return ready if ready[1] else self._leave(self._patience_s)
        # In its loop, kazoo also waits for new requests; elsewhere, it waits for the server alone.
        is_due = len(readable) == 1 or self.client._pending or self.ping_outstanding.is_set()
        if not is_due:
            self._silent_since = None
            return select(readable, writable, broken, timeout)
        now = self._clock.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        left_s = self._silent_since + self._patience_s - now
        ready = select(readable, writable, broken, min(timeout, max(left_s, GLANCE_S)))
        if self._socket not in ready[0] and self._clock.monotonic() - self._silent_since >= self._patience_s:
            # This process may have been stopped: an answer that has arrived in the meantime counts.
            ready = select([self._socket], [], [], GLANCE_S)
            if not ready[0]:
                self._leave(self._patience_s)
        if self._socket in ready[0]:
            self._silent_since = None
        return ready

    def _leave(self, silent_s: float) -> Any:
        if self._in_handshake and self._unheard_since is None:
            self._unheard_since = self._clock.monotonic() - silent_s
        raise ConnectionDropped(f"the server has owed an answer for {silent_s:.1f} s")


def _bounded_handler() -> Any:
    """Create kazoo's handler for threads, gevent or eventlet, with a bound on the time of a TCP connect.

    If its attribute ``watch`` is set, it is called instead of ``select``, with ``select`` as the first
    argument.
    """

    class BoundedHandler(_handler()):  # type: ignore[misc]  # kazoo ships no types
        """A handler that leaves an unresponsive host while there is time to try another one."""

        watch: Callable[..., Any] | None = None

        def select(self, *args: Any, **kwargs: Any) -> Any:
            if self.watch is None:
                return super().select(*args, **kwargs)
            return self.watch(super().select, *args, **kwargs)

        def create_connection(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["timeout"] = min(float(kwargs.get("timeout") or CONNECT_TIMEOUT_S), CONNECT_TIMEOUT_S)
            return super().create_connection(*args, **kwargs)

    return BoundedHandler()


def _handler() -> Any:
    environment = detect_environment()
    if environment == "gevent":
        return _gevent_handler()
    if environment == "eventlet":
        from kazoo.handlers.eventlet import SequentialEventletHandler

        return SequentialEventletHandler
    from kazoo.handlers.threading import SequentialThreadingHandler

    return SequentialThreadingHandler


def _gevent_handler() -> Any:
    """Return kazoo's handler for gevent, whose timeouts are ordinary exceptions, as in its other handlers.

    kazoo's own handler returns gevent's results. After a timeout, these raise :exc:`gevent.Timeout`. That is
    a base class of the handler's ``timeout_exception`` and not derived from :exc:`Exception`. No ``except``
    clause of a caller catches it, and it ends the greenlet.
    """
    from kazoo.handlers import gevent
    from kazoo.handlers.threading import KazooTimeoutError

    class Answer(gevent.AsyncResult):  # type: ignore[misc]  # kazoo ships no types
        """The pending answer to a request. A :exc:`gevent.Timeout` of the caller is raised unchanged."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if block and not self.ready():
                # `wait` raises no timeout of its own, so a timeout raised here was started by the caller. It
                # always switches greenlets, which a callback in the hub must not do: there the answer is
                # ready.
                self.wait(timeout)
            if not self.ready():
                raise KazooTimeoutError("no answer in time")
            return super().get(block=False)

    class SequentialGeventHandler(gevent.SequentialGeventHandler):  # type: ignore[misc]  # kazoo ships no types
        timeout_exception = KazooTimeoutError

        def async_result(self) -> Answer:
            return Answer()

    return SequentialGeventHandler
