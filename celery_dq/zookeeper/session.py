"""One session with ZooKeeper, and its states.

::

    CLOSED ──open──▶ SUSPENDED ◀───▶ CONNECTED
                        │  ▲
         the server says so  a new session
                        ▼  │
                        LOST

* *CONNECTED*: requests are answered, as far as the client knows.
* *SUSPENDED*: the connection broke. The session and its ephemeral nodes may still exist.
* *LOST*: the session has expired, and its ephemeral nodes are gone. Only a server can report this, so a
  client that is cut off stays suspended. A client that acts as the owner of a node must therefore also
  watch a clock (:mod:`celery_dq.leadership.career`).
* *CLOSED*: not opened yet, or closed.

The session uses kazoo's plain client and none of its recipes. It differs from kazoo's defaults:

* A TCP connect takes at most two seconds; a host that drops packets would otherwise cost a whole session.
* Pauses between attempts to connect never exceed a second; by default, they grow to an hour.
* No request is retried over a change of session.
* TLS checks the host name.
* The negotiated session timeout is known.

:mod:`celery_dq.compat.kazoo_connection` decides when the client leaves a server for another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
)
from kazoo.protocol.states import KazooState

from celery_dq.compat.kazoo_connection import Address, new_client, session_id_of
from celery_dq.errors import AccessDenied, ConfigurationError, ZooKeeperUnreachable
from celery_dq.outage import Outage
from celery_dq.per_process import PerProcess
from celery_dq.shown import shown_logger, shown_url
from celery_dq.zookeeper.credentials import OURS, Spelling, check, is_refusal, why_refused

__all__ = ["PinnedSession", "Session", "SessionState"]

logger = shown_logger(__name__)

#: Minimum seconds allowed for the check of the chroot.
CHECK_TIMEOUT_S = 5.0

#: Errors of requests without an answer; each may have been carried out.
SILENCE = (
    ConnectionLoss,
    SessionExpiredError,
    ConnectionClosedError,
    OperationTimeoutError,
)
#: Errors of a connection attempt that kazoo's loop handles; any other error would end the loop.
ENDINGS = (ConnectionDropped, SessionExpiredError, AuthFailedError)


class SessionState(Enum):
    """The state of a session as far as the client knows; see the module."""

    CLOSED = "closed"
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class _SessionProcess:
    """The state of one process: a forked child inherits the object, but neither threads nor the session."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Any = None
        self.state = SessionState.CLOSED
        self.negotiated_s: float | None = None
        self.session_id: int | None = None
        self.listeners: list[Callable[[SessionState], None]] = []
        #: An event that is set when the chroot may be gone; None until the chroot was seen.
        self.chroot_gone: Any = None
        #: Held by the thread that creates the chroot.
        self.making = threading.Lock()
        #: Events of the calls that wait for a connection or for the refusal of all servers.
        self.waiting: list[Any] = []
        #: Why the last attempt to connect failed; "" after a success.
        self.trouble = ""
        #: Servers that refuse the credentials or TLS, and the reason.
        self.refusals: dict[tuple[str, int], str] = {}
        #: Whether kazoo has stopped to connect.
        self.ended = False
        self.outage = Outage(logger, "zookeeper_outage")

    @property
    def has_chroot(self) -> bool:
        """Whether the chroot exists and is accessible."""
        return self.chroot_gone is not None and not self.chroot_gone.is_set()

    def wake(self) -> None:
        """Wake all waiting calls."""
        for event in tuple(self.waiting):
            event.set()


class Session:
    """A session with ZooKeeper, one per process; opened at the first request. Thread-safe.

    Args:
        hosts: ``host:2181,host:2181/chroot``; the chroot is created if it is missing.
        timeout_s: The session timeout to request, in seconds; default 10. The server limits it to 2 to 20 of
            its ticks.
        auth: (scheme, credential) pairs, such as ``("digest", "user:secret")``.
        sasl: kazoo's ``sasl_options``, such as ``{"mechanism": "DIGEST-MD5", "username": …,
            "password": …}``; needs ``pip install 'celery-dq[zookeeper-sasl]'``.
        tls: None means plain text. Keys ``ca``, ``certfile``, ``keyfile``, ``keyfile_password``,
            ``verify_certs`` and ``check_hostname``; the last two default to True.
        acl: kazoo's ACLs for every node that the session creates. Default: with `auth` or `sasl`, only the
            creator of a node has access to it; without them, every client has full access.
        spelling: The names of the options for errors.

    Raises:
        ConfigurationError: The settings cannot work with any server.
    """

    def __init__(
        self,
        hosts: str,
        *,
        timeout_s: float = 10.0,
        auth: Sequence[tuple[str, str]] = (),
        sasl: Mapping[str, Any] | None = None,
        tls: Mapping[str, Any] | None = None,
        acl: Sequence[Any] | None = None,
        spelling: Spelling = OURS,
    ) -> None:
        if not hosts:
            raise ConfigurationError("hosts = '' names no ZooKeeper: give 'host:2181,host:2181/chroot'")
        if "@" in hosts:
            raise ConfigurationError(
                f"hosts = {shown_url(hosts)!r} holds a login: give 'host:2181,host:2181/chroot', and the "
                f"login in {spelling.auth}"
            )
        self.hosts = hosts
        check(auth, sasl, tls, spelling)
        self._spelling = spelling
        self._wanted_s = timeout_s
        self._auth = [(scheme, credential) for scheme, credential in auth]
        self._sasl = dict(sasl) if sasl else None
        self._tls = dict(tls) if tls is not None else None
        self._acl = list(acl) if acl else None
        # A forked child shares the socket with its parent, so it must not stop the parent's client.
        self._state = PerProcess(_SessionProcess)

    # -- states

    @property
    def state(self) -> SessionState:
        """The current state of the session as far as the client knows."""
        return self._state.get().state

    @property
    def outage(self) -> Outage:
        """Whether ZooKeeper answers; shared by all users of the session, so that each outage is one line."""
        return self._state.get().outage

    @property
    def id(self) -> int | None:
        """The id of the current or last session; None before the first session."""
        # kazoo forgets it while the connection is broken, although the session lives on.
        return self._state.get().session_id

    @property
    def timeout_s(self) -> float:
        """The negotiated session timeout in seconds; the requested one before the first connection."""
        return self._state.get().negotiated_s or self._wanted_s

    def add_listener(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` with every new state, in the connection's thread; it must not block."""
        self._state.get().listeners.append(listener)

    def remove_listener(self, listener: Callable[[SessionState], None]) -> None:
        """Do not call `listener` any more."""
        listeners = self._state.get().listeners
        if listener in listeners:
            listeners.remove(listener)

    # -- open and close

    def open(self, timeout_s: float = 15.0) -> Any:
        """Return the connected client of this process; wait for a connection if necessary.

        Args:
            timeout_s: Maximum seconds to wait; default 15.

        Raises:
            ZooKeeperUnreachable: No server answered in time; connecting continues in the background.
            ConfigurationError: All servers refused the credentials, or their certificates are not valid.
            AccessDenied: An ACL denies access to the chroot.
        """
        own = self._state.get()
        client = own.client
        if own.state is SessionState.CONNECTED and own.has_chroot and client is not None:
            return client
        with own.lock:
            if own.client is None:
                own.client = self._connecting(own)
            client = own.client
        ready = client.handler.event_object()
        own.waiting.append(ready)
        try:
            deadline = time.monotonic() + timeout_s
            while not (own.state is SessionState.CONNECTED or self._is_refused(own, client)):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                ready.wait(left_s)
                ready.clear()
        finally:
            own.waiting.remove(ready)
        if own.state is SessionState.CONNECTED:
            self._make_chroot(own, client)
            return client
        if self._is_refused(own, client):
            why = "; ".join(dict.fromkeys(own.refusals.values()))
            if own.ended or own.session_id is None:
                # The next attempt starts with a new client, because the settings of the servers may change.
                self.close()
            raise ConfigurationError(f"ZooKeeper at {self.hosts}: {why}")
        trouble = f"; the last attempt: {own.trouble}" if own.trouble else ""
        raise ZooKeeperUnreachable(
            f"ZooKeeper at {self.hosts} did not answer within {timeout_s:g} s{trouble}"
        )

    def ask(self, request: Callable[[Any], Any], timeout_s: float) -> Any:
        """Send one request and return its answer.

        No request is sent while the session is suspended. kazoo would keep it and send it later, when it may
        not apply any more.

        Args:
            request: Receives the client and returns one of kazoo's asynchronous results.
            timeout_s: Seconds to wait for a connection, and then for the answer.

        Raises:
            ZooKeeperUnreachable: No answer came; the request may have been carried out.
            ConfigurationError: The server refused the credentials.
            kazoo.exceptions.KazooException: The server refused the request.
        """
        client = self.open(timeout_s)
        return self.answer(client, request(client), timeout_s)

    def children(self, folder: str, timeout_s: float) -> list[str]:
        """Return the names in a folder; none if it does not exist. The errors are those of :meth:`ask`."""
        try:
            names: list[str] = self.ask(lambda client: client.get_children_async(folder), timeout_s)
        except NoNodeError:
            return []
        return names

    def answer(self, client: Any, pending: Any, timeout_s: float) -> Any:
        """Wait for the answer to a request that was sent. The errors are those of :meth:`ask`."""
        try:
            return pending.get(timeout=timeout_s)
        except (*SILENCE, client.handler.timeout_exception) as error:
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self.hosts} did not answer within {timeout_s:g} s: {error!r}"
            ) from None
        except KazooException as error:
            # The caller handles a denial by the ACL of a single node, because it knows the node.
            if is_refusal(error) and not isinstance(error, NoAuthError):
                raise ConfigurationError(
                    f"ZooKeeper at {self.hosts}: {why_refused(error, self._spelling)}"
                ) from error
            raise

    def close(self) -> None:
        """End the session and its ephemeral nodes; a later request opens a new one."""
        own = self._state.get()
        with own.lock:
            client, own.client = own.client, None
        if client is not None:
            client.stop()
            client.close()
        own.chroot_gone = None
        self._become(own, SessionState.CLOSED)

    # -- inside

    def _make_chroot(self, own: _SessionProcess, client: Any) -> None:
        """Create the chroot if it is missing, and check the access to it.

        A watch on the chroot fires when it is deleted or the connection breaks; then the next request checks
        the chroot again.
        """
        with own.making:
            if own.has_chroot:
                return
            patience_s = max(self._wanted_s, CHECK_TIMEOUT_S)
            gone = client.handler.event_object()
            watch = {"watch": lambda _event: gone.set()} if client.chroot else {}

            def look() -> None:
                self.answer(client, client.get_async("/", **watch), patience_s)

            try:
                try:
                    look()
                except NoNodeError:
                    self._make_from_outside(client.chroot, patience_s)
                    look()
            except (ConfigurationError, NoAuthError) as error:
                if own.chroot_gone is None:
                    self.close()
                if isinstance(error, ConfigurationError):
                    raise
                why = why_refused(error, self._spelling)
                raise AccessDenied(f"ZooKeeper at {self.hosts}: {why}") from error
            except NoNodeError:
                raise ZooKeeperUnreachable(
                    f"ZooKeeper at {self.hosts}: {client.chroot} was deleted as soon as it was created"
                ) from None
            own.chroot_gone = gone

    def _make_from_outside(self, chroot: str, patience_s: float) -> None:
        """Create the chroot with a client that has no chroot."""
        outside = Session(
            self.hosts.partition("/")[0],
            timeout_s=self._wanted_s,
            auth=self._auth,
            sasl=self._sasl,
            tls=self._tls,
            acl=self._acl,
            spelling=self._spelling,
        )
        try:
            outside.ask(lambda client: client.ensure_path_async(chroot), patience_s)
        finally:
            outside.close()

    @staticmethod
    def _is_refused(own: _SessionProcess, client: Any) -> bool:
        """Whether every server of the list refuses this client."""
        return len(own.refusals) >= len(client.hosts)

    def _connecting(self, own: _SessionProcess) -> Any:
        client = new_client(
            self.hosts,
            timeout_s=self._wanted_s,
            auth=self._auth,
            sasl=self._sasl,
            tls=self._tls,
            acl=self._acl,
            on_connected=lambda client, session_s: self._connected(own, client, session_s),
            on_failure=lambda client, address, error: self._not_connected(own, client, address, error),
            on_unreachable=lambda: self._warn(own),
        )
        client.add_listener(lambda state: self._on_kazoo_state(own, state))
        own.state, own.ended, own.refusals = SessionState.SUSPENDED, False, {}
        client.start_async()
        return client

    def _connected(self, own: _SessionProcess, client: Any, session_s: float) -> None:
        own.trouble, own.refusals = "", {}
        own.session_id = session_id_of(client)
        own.negotiated_s = round(session_s, 3)
        if client.state == KazooState.CONNECTED:
            self._become(own, SessionState.CONNECTED)
        own.outage.over("ZooKeeper at %s accepts the connections of this process again.", self.hosts)

    def _not_connected(
        self, own: _SessionProcess, client: Any, address: Address, error: Exception
    ) -> Exception:
        """Record why an attempt failed; return an error that does not end kazoo's loop, if possible."""
        reported: Exception = error
        why = why_refused(error, self._spelling)
        own.trouble = why or f"{type(error).__name__}: {error}"
        if why is not None:
            own.refusals[address] = why
            own.wake()
        if is_refusal(error):
            # This is the only error that ends kazoo's loop without a traceback.
            own.ended, reported = True, AuthFailedError(why)
            self._warn(own)
        elif not isinstance(error, (*ENDINGS, client.handler.timeout_exception)):
            reported = ConnectionDropped(own.trouble)
        return reported

    def _warn(self, own: _SessionProcess) -> None:
        text = (
            "ZooKeeper at %s accepts no connection of this process (%s). Until one answers, requests fail; "
            "after %g s, leaderships and locks end. Check that the servers run and this list is right."
        )
        own.outage.began(text, self.hosts, own.trouble or "no host name resolves", self.timeout_s)

    def _on_kazoo_state(self, own: _SessionProcess, state: str) -> None:
        # kazoo reports CONNECTED before the timeout is known; `_connected` reports it instead.
        if state == KazooState.SUSPENDED:
            self._become(own, SessionState.SUSPENDED)
        elif state == KazooState.LOST:
            self._become(own, SessionState.LOST)

    def _become(self, own: _SessionProcess, state: SessionState) -> None:
        if state is own.state:
            return
        own.state = state
        own.wake()
        for listener in tuple(own.listeners):
            try:
                listener(state)
            except Exception:  # noqa: PERF203 - a handful of listeners
                # An error of a listener must not end the connection's thread.
                logger.exception(
                    "A listener of the ZooKeeper session at %s failed for state %s; the session continues.",
                    self.hosts,
                    state.value,
                    extra={"event": "zookeeper_listener_failed"},
                )


class PinnedSession(Session):
    """The current session of a :class:`Session`. After its end, requests raise and open no further session.

    Args:
        session: Opened if necessary.

    Attributes:
        client: The client of the session.
    """

    def __init__(self, session: Session) -> None:
        self.client: Any = session.open()
        # Both objects share the state of the session.
        vars(self).update(vars(session))
        self._pinned = session.id

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, and its ephemeral nodes with it, as far as the client knows."""
        return self.state in {SessionState.LOST, SessionState.CLOSED} or self.id != self._pinned

    @property
    def is_connected(self) -> bool:
        """Whether requests of the session are answered, as far as the client knows."""
        return self.state is SessionState.CONNECTED and not self.is_over

    def open(self, timeout_s: float = 15.0) -> Any:
        """Return the client without waiting for a connection.

        Raises:
            ZooKeeperUnreachable: The session has ended.
        """
        if self.is_over:
            raise ZooKeeperUnreachable(f"The session with ZooKeeper at {self.hosts} has ended")
        return self.client
