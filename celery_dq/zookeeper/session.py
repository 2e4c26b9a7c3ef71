"""One session with ZooKeeper, whose states others can listen to.

::

    CLOSED ──open──▶ SUSPENDED ◀───▶ CONNECTED
                        │  ▲
         the server says so  a new session
                        ▼  │
                        LOST

* *CONNECTED*: requests are answered, as far as the client knows.
* *SUSPENDED*: the connection broke. The session may live on; so may everything ephemeral of it.
* *LOST*: the session has expired; its ephemeral nodes are gone. Only a server can say so, which means
  that a client who is cut off stays suspended: whoever acts as the owner of a node needs a clock of
  his own (:mod:`celery_dq.leadership.career`).
* *CLOSED*: not opened yet, or closed.

Built on the plain client of kazoo, none of its recipes. What is set differently from its defaults: a TCP
connect takes two seconds at most (a host that drops packets would cost a whole session), pauses between
attempts never exceed a second (they would grow to an hour), nothing is retried over a session change,
TLS checks the host name, and the negotiated session timeout is known.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    OperationTimeoutError,
    SessionExpiredError,
)
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from celery_dq.errors import AccessDenied, ConfigurationError, ZooKeeperUnreachable
from celery_dq.zookeeper.credentials import OURS, Spelling, check, is_refusal, why_refused
from celery_dq.zookeeper.handler import bounded_handler

__all__ = ["Session", "State"]

logger = logging.getLogger(__name__)

#: Seconds between two attempts to connect, at most.
LONGEST_PAUSE_S = 1.0
#: Seconds that the first look may take, at least: it happens once.
CHECK_TIMEOUT_S = 5.0
#: kazoo tells the read timeout, which is this share of the session timeout.
READ_SHARE = 2.0 / 3.0

#: Nobody answered, or not as the session that asked.
SILENCE = (
    ConnectionLoss,
    SessionExpiredError,
    ConnectionClosedError,
    OperationTimeoutError,
)
#: How a connection attempt may end, as far as kazoo's loop is concerned; others would end the loop.
ENDINGS = (ConnectionDropped, SessionExpiredError, AuthFailedError)


class State(Enum):
    """What is known of the session; see the module."""

    CLOSED = "closed"
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class _Own:
    """What belongs to one process: a fork inherits the object, but neither threads nor the session."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.client: Any = None
        self.state = State.CLOSED
        self.negotiated_s: float | None = None
        self.session_id: int | None = None
        self.listeners: list[Callable[[State], None]] = []
        self.has_chroot = False
        #: Those who wait for a connection, or to hear that there will be none.
        self.waiting: list[Any] = []
        #: Why the last attempt to connect failed; "" after one that did not.
        self.trouble = ""
        #: Servers that cannot be talked to as who we are -> why.
        self.refusals: dict[tuple[str, int], str] = {}
        #: kazoo connects no more.
        self.ended = False

    def ring(self) -> None:
        """Let those who wait look again."""
        for event in tuple(self.waiting):
            event.set()


class Session:
    """A session, one per process; opened at first need, thread-safe.

    :param hosts: ``host:2181,host:2181/chroot``; the chroot is made when it is missing.
    :param timeout_s: the session timeout to ask for, in seconds; the server has bounds of its own
        (2 to 20 of its ticks). Default 10.
    :param auth: (scheme, credential) pairs, such as ``("digest", "user:secret")``.
    :param sasl: kazoo's ``sasl_options``, such as ``{"mechanism": "DIGEST-MD5", "username": …,
        "password": …}``; needs ``pip install 'celery-dq[zookeeper-sasl]'``.
    :param tls: None is plain text. Keys ``ca``, ``certfile``, ``keyfile``, ``keyfile_password``,
        ``verify_certs`` and ``check_hostname``; both of the last are True unless said otherwise.
    :param acl: kazoo's ACLs for every node that is made. Default: with `auth` or `sasl` whoever made a node
        may do everything with it and nobody else anything; without them everybody may do everything.
    :param spelling: what the user calls the options, for errors.

    Raises :exc:`~celery_dq.errors.ConfigurationError` when it cannot work, whatever the server says.
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
        self.hosts = hosts
        check(auth, sasl, tls, spelling)
        self._spelling = spelling
        self._wanted_s = timeout_s
        self._auth = [(scheme, credential) for scheme, credential in auth]
        self._sasl = dict(sasl) if sasl else None
        self._tls = dict(tls) if tls is not None else None
        self._acl = list(acl) if acl else None
        self._mine = _Own()

    # -- states

    @property
    def state(self) -> State:
        """What is known of the session at this moment."""
        return self._own().state

    @property
    def id(self) -> int | None:
        """The id of the session; a new session has a new one. None before the first."""
        # kazoo forgets it while the connection is broken, although the session lives on.
        return self._own().session_id

    @property
    def timeout_s(self) -> float:
        """The negotiated session timeout in seconds; the wanted one until a server has spoken."""
        return self._own().negotiated_s or self._wanted_s

    def listen(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with every new state, from the connection's thread: it must not block."""
        self._own().listeners.append(listener)

    def unlisten(self, listener: Callable[[State], None]) -> None:
        """Do not call `listener` any more."""
        listeners = self._own().listeners
        if listener in listeners:
            listeners.remove(listener)

    # -- open and close

    def open(self, timeout_s: float = 15.0) -> Any:
        """The connected client of this process; waits up to `timeout_s` seconds for a connection.

        Raises:
            ZooKeeperUnreachable: Nobody answered in time; connecting goes on in the background.
            ConfigurationError: The servers refused the credentials, or theirs do not hold.
        """
        own = self._own()
        client = own.client
        if own.state is State.CONNECTED and own.has_chroot and client is not None:
            return client
        with own.lock:
            if own.client is None:
                own.client = self._connecting(own)
            client = own.client
        ready = client.handler.event_object()
        own.waiting.append(ready)
        try:
            deadline = time.monotonic() + timeout_s
            while not (own.state is State.CONNECTED or self._is_refused(own, client)):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                ready.wait(left_s)
                ready.clear()
        finally:
            own.waiting.remove(ready)
        if own.state is State.CONNECTED:
            self._make_chroot(own, client)
            return client
        if self._is_refused(own, client):
            why = "; ".join(dict.fromkeys(own.refusals.values()))
            if own.ended or own.session_id is None:
                # Whoever tries again begins anew: somebody may have mended it.
                self.close()
            raise ConfigurationError(f"ZooKeeper at {self.hosts}: {why}")
        trouble = f"; the last attempt: {own.trouble}" if own.trouble else ""
        raise ZooKeeperUnreachable(
            f"ZooKeeper at {self.hosts} did not answer within {timeout_s:g} s{trouble}"
        )

    def ask(self, request: Callable[[Any], Any], timeout_s: float) -> Any:
        """Send one request and return its answer.

        Nothing is sent while the session is suspended: kazoo would keep it and send it later, when
        it may mean something else.

        :param request: gets the client, returns one of kazoo's asynchronous results.
        :param timeout_s: seconds to wait for the answer.

        Raises:
            ZooKeeperUnreachable: No answer. The request may have been carried out all the same.
            ConfigurationError: The server refuses our credentials.
            kazoo.exceptions.KazooException: What the server answered.
        """
        return self._answer(self.open(timeout_s), request, timeout_s)

    def _answer(self, client: Any, request: Callable[[Any], Any], timeout_s: float) -> Any:
        try:
            return request(client).get(timeout=timeout_s)
        except (*SILENCE, client.handler.timeout_exception) as error:
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self.hosts} did not answer within {timeout_s:g} s: {error!r}"
            ) from None
        except KazooException as error:
            # An ACL of a single node is the caller's affair, who knows what the node is.
            if is_refusal(error) and not isinstance(error, NoAuthError):
                raise ConfigurationError(
                    f"ZooKeeper at {self.hosts}: {why_refused(error, self._spelling)}"
                ) from error
            raise

    def drop(self) -> None:
        """Break the connection, so that the client looks for another server.

        For a server that is dead while requests flow: every request counts as a sign of life to
        kazoo, whether or not it is answered.
        """
        client = self._own().client
        connection = getattr(getattr(client, "_connection", None), "_socket", None)
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("The connection was gone already: %r", error)

    def close(self) -> None:
        """End the session: its ephemeral nodes go at once. It may be opened again."""
        own = self._own()
        with own.lock:
            client, own.client = own.client, None
        if client is not None:
            client.stop()
            client.close()
        self._become(own, State.CLOSED)

    # -- inside

    def _own(self) -> _Own:
        own = self._mine
        if own.pid != os.getpid():
            # Never stop what the parent uses: they share the connection's socket.
            own = self._mine = _Own()
        return own

    def _make_chroot(self, own: _Own, client: Any) -> None:
        """Make the folder that everything is relative to: only a client that is outside of it can.

        And see whether we are let in there, before somebody depends on it.
        """
        if own.has_chroot:
            return
        hosts, slash, chroot = self.hosts.partition("/")
        patience_s = max(self._wanted_s, CHECK_TIMEOUT_S)
        try:
            if slash and chroot:
                outside = Session(
                    hosts,
                    timeout_s=self._wanted_s,
                    auth=self._auth,
                    sasl=self._sasl,
                    tls=self._tls,
                    acl=self._acl,
                    spelling=self._spelling,
                )
                try:
                    outside.ask(lambda client: client.ensure_path_async(f"/{chroot}"), patience_s)
                finally:
                    outside.close()
            self._answer(client, lambda client: client.get_async("/"), patience_s)
        except ConfigurationError:
            self.close()
            raise
        except NoAuthError as error:
            self.close()
            raise AccessDenied(f"ZooKeeper at {self.hosts}: {why_refused(error, self._spelling)}") from error
        own.has_chroot = True

    @staticmethod
    def _is_refused(own: _Own, client: Any) -> bool:
        """Whether no server of the list talks to us: one that does is enough."""
        return len(own.refusals) >= len(client.hosts)

    def _connecting(self, own: _Own) -> Any:
        handler = bounded_handler()
        options: dict[str, Any] = {}
        if self._acl:
            options["default_acl"] = self._acl
        elif self._auth or self._sasl:
            options["default_acl"] = CREATOR_ALL_ACL
        if self._tls is not None:
            options.update({"use_ssl": True, "verify_certs": True, "check_hostname": True, **self._tls})
        client = KazooClient(
            hosts=self.hosts,
            timeout=self._wanted_s,
            handler=handler,
            auth_data=self._auth or None,
            sasl_options=dict(self._sasl) if self._sasl else None,
            connection_retry=KazooRetry(
                max_tries=-1,
                delay=0.1,
                backoff=2,
                max_delay=LONGEST_PAUSE_S,
                sleep_func=handler.sleep_func,
            ),
            command_retry=KazooRetry(max_tries=1, ignore_expire=False, sleep_func=handler.sleep_func),
            **options,
        )
        connect = client._connection._connect

        def negotiate(*args: Any) -> Any:
            # The one place where kazoo tells what the server has granted, and what went wrong.
            try:
                granted = connect(*args)
            except Exception as error:
                why = why_refused(error, self._spelling)
                own.trouble = why or f"{type(error).__name__}: {error}"
                if why is not None:
                    own.refusals[args[1:3]] = why
                    own.ring()
                    if is_refusal(error):
                        # kazoo ends its loop in good order for this one only.
                        own.ended = True
                        raise AuthFailedError(why) from error
                if isinstance(error, (*ENDINGS, handler.timeout_exception)):
                    raise
                raise ConnectionDropped(own.trouble) from error
            own.trouble, own.refusals = "", {}
            own.session_id = client._session_id
            own.negotiated_s = round(granted[0] / READ_SHARE / 1000.0, 3)
            if client.state == KazooState.CONNECTED:
                self._become(own, State.CONNECTED)
            return granted

        client._connection._connect = negotiate
        client.add_listener(lambda state: self._heard(own, state))
        own.state, own.ended, own.refusals = State.SUSPENDED, False, {}
        client.start_async()
        return client

    def _heard(self, own: _Own, state: str) -> None:
        # CONNECTED is heard too early, before the timeout is known; `negotiate` tells it.
        if state == KazooState.SUSPENDED:
            self._become(own, State.SUSPENDED)
        elif state == KazooState.LOST:
            self._become(own, State.LOST)

    def _become(self, own: _Own, state: State) -> None:
        if state is own.state:
            return
        own.state = state
        own.ring()
        for listener in tuple(own.listeners):
            try:
                listener(state)
            except Exception:  # noqa: PERF203 - a handful of listeners
                # The connection's thread must outlive its listeners.
                logger.exception("A listener of the ZooKeeper session failed.")
