"""The coordinator for the workers of any broker: dedup machines in Redis, with leases.

Each key is one hash, which one script at a time changes. Times are those of the server. A lease belongs to an
owner. The owner gets a message on its own channel when one of its waiting calls may start, so it need not
poll. If that message is lost, the next renewal reports the change. The settings of an app name the Redis.

One thread of a process renews its leases, and receives the wake-ups for waiting calls that may start or have
their result. It is a thread, because a long task or a blocked event loop must not lose its dedup locks.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import threading
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.daemon_threads import start_daemon
from celery_dq.dedup.machine import (
    Coordinator,
    CoordinatorLockSnapshot,
    DedupOptions,
    DedupResult,
    HeldDedupLock,
    Verdict,
    WaitingCall,
)
from celery_dq.errors import ConfigurationError
from celery_dq.keys import DedupKeys
from celery_dq.options.resolve import REDIS_URLS
from celery_dq.options.schema import refuse_unreadable_url
from celery_dq.options.sections import Options
from celery_dq.outage import Outage
from celery_dq.scripts.loader import ScriptSet, is_noscript
from celery_dq.shown import shown_logger, shown_url

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "DedupLockHeartbeat",
    "OwnRedis",
    "REQUEST_ERRORS",
    "RedisCoordinator",
    "RedisRefused",
    "SILENCE",
    "load_scripts",
    "redis_of",
]

logger = shown_logger(__name__)


class RedisRefused(redis.ResponseError):
    """Redis refuses all writes, or all requests, for now."""


#: Errors of a server that serves no request, so that no dedup lock can be requested.
SILENCE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.MasterDownError,
    RedisRefused,
    OSError,
)
#: All errors of a request: those of the server, and those that concern one key.
REQUEST_ERRORS = (redis.RedisError, OSError)
#: The codes of such refusals that have no class in redis-py. Before Redis 7 an error inside a script is
#: wrapped in another.
_REFUSES_ALL = re.compile(r"(^|-)(MISCONF|NOREPLICAS|BUSY|OOM|READONLY) ")

#: Seconds for which a declined call is remembered, as in ``enqueue.lua``: a broker may deliver it again.
DECLINED_S = 86_400

_CALL = struct.Struct(">ddddHH")
#: The time limit of an answer, as a share of the lease. A worker waits that long once per outage.
PATIENCE = 1 / 3


def load_scripts() -> ScriptSet:
    """Read the scripts of the coordinator."""
    return ScriptSet(files(__package__) / "lua", "enqueue", "free", "leave", "heartbeat", "start")


class RedisCoordinator:
    """Dedup machines in Redis.

    Args:
        client: a redis-py client that does not decode replies.
        keys: makes the names of the Redis keys.
        scripts: from :func:`load_scripts`.
        owner: the unique name of the process that renews the calls enqueued here.
        lease: seconds without a renewal after which the owner's calls are dropped.
    """

    def __init__(
        self, client: Any, keys: DedupKeys, scripts: ScriptSet, *, owner: str, lease: float = 15.0
    ) -> None:
        self.keys_of = keys
        self.owner = owner
        self._client = client
        self._scripts = scripts
        self._lease_ms = max(int(lease * 1000), 1)

    @property
    def channel(self) -> str:
        """The channel on which this owner learns that one of its calls may start, or has lost its place."""
        return self.keys_of.channel + self.owner

    def wake(self) -> None:
        """Wake this owner, as if one of its waiting calls might start."""
        self._client.publish(self.channel, "")

    def _run(self, script: str, key: str, *args: str | int) -> Any:
        keys = (self.keys_of.dedup_lock(key), self.keys_of.tokens)
        return self._scripts[script].run(self._client, keys, (self.keys_of.channel, *args))

    def enqueue(self, key: str, call: str, **options: Unpack[DedupOptions]) -> DedupResult:
        """See :meth:`Coordinator.enqueue`."""
        timeout = options.get("timeout")
        timeout_ms = 0 if timeout is None else max(int(timeout * 1000), 1)
        verdict, covering, token, replaced, left = map(
            _text,
            self._run(
                "enqueue",
                key,
                call,
                self.owner,
                options.get("task", ""),
                self._lease_ms,
                timeout_ms,
                options.get("policy", "decline"),
                options.get("waiting", 1),
                int(options.get("follow", False)),
            ),
        )
        return DedupResult(Verdict(verdict), covering, int(token), replaced or None, bool(left))

    def start(self, key: str, call: str) -> int | None:
        """See :meth:`Coordinator.start`."""
        token = int(self._run("start", key, call, self._lease_ms))
        return None if token < 0 else token

    def finish(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.finish`."""
        return token > 0 and int(self._run("leave", key, "finish", call, token)) == 1

    def release(self, key: str, call: str, token: int) -> bool:
        """See :meth:`Coordinator.release`."""
        return token > 0 and int(self._run("leave", key, "release", call, token)) == 1

    def withdraw(self, key: str, call: str) -> bool:
        """See :meth:`Coordinator.withdraw`."""
        return int(self._run("leave", key, "withdraw", call, 0)) == 1

    def renew(self, holdings: Sequence[HeldDedupLock]) -> list[bool]:
        """See :meth:`Coordinator.renew`. One round trip for all; without holdings a PING of the server."""
        if not holdings:
            self._client.ping()
            return []
        script = self._scripts["heartbeat"]
        with self._client.pipeline(transaction=False) as pipe:
            for key, call, token in holdings:
                args = (self.keys_of.channel, call, token, self._lease_ms)
                pipe.execute_command(*script.command((self.keys_of.dedup_lock(key),), args))
            replies = pipe.execute(raise_on_error=False)
        alive = []
        for (key, call, token), reply in zip(holdings, replies, strict=True):
            if isinstance(reply, Exception):
                if not is_noscript(reply):
                    raise _recognised(reply)
                reply = self._run("heartbeat", key, call, token, self._lease_ms)
            alive.append(int(reply) == 1)
        return alive

    def remember_covered(self, task: str, covering: str) -> None:
        """See :meth:`Coordinator.remember_covered`."""
        self._client.set(self.keys_of.declined(task), covering, ex=DECLINED_S)

    def forget_covered(self, task: str) -> None:
        """See :meth:`Coordinator.forget_covered`."""
        self._client.delete(self.keys_of.declined(task))

    def inspect(self, key: str) -> CoordinatorLockSnapshot | None:
        """See :meth:`Coordinator.inspect`."""
        found = self._client.hmget(self.keys_of.dedup_lock(key), ["head", "heir", "tail", "followed"])
        seconds, micros = self._client.time()
        return _snapshot(key, found, int(seconds) + int(micros) / 1e6)

    def keys(self, prefix: str = "") -> list[str]:
        """See :meth:`Coordinator.keys`."""
        start = len(self.keys_of.dedup_lock(""))
        found = self._client.scan_iter(match=_glob(self.keys_of.dedup_lock(prefix)) + "*", count=1000)
        return sorted(unquote(_text(each)[start:]) for each in found)

    def free(self, key: str) -> CoordinatorLockSnapshot | None:
        """See :meth:`Coordinator.free`."""
        found = self._run("free", key)
        seconds, micros = self._client.time()
        return _snapshot(key, found, int(seconds) + int(micros) / 1e6)

    def count_decline(self, key: str) -> None:
        """See :meth:`Coordinator.count_decline`."""
        self._client.hincrby(self.keys_of.verdicts(key.partition("|")[0]), "decline", 1)

    def verdicts(self, queue: str) -> dict[str, int]:
        """See :meth:`Coordinator.verdicts`."""
        found = self._client.hgetall(self.keys_of.verdicts(queue))
        return {_text(verdict): int(count) for verdict, count in found.items()}


def _snapshot(key: str, found: Sequence[Any], now: float) -> CoordinatorLockSnapshot | None:
    followed = json.loads(_text(found[3])) if found[3] else {}
    head, heir, tail = (_waiting(each, now, followed) for each in found[:3])
    return None if head is heir is tail is None else CoordinatorLockSnapshot(key, head, heir, tail)


def _waiting(packed: Any, now: float, followed: dict[str, list[Any]]) -> WaitingCall | None:
    if not packed:
        return None
    raw = packed if isinstance(packed, bytes) else str(packed).encode("utf-8", "surrogateescape")
    token, since, lease, timeout, n_id, n_owner = _CALL.unpack_from(raw)
    owner_at = _CALL.size + n_id
    call, owner = raw[_CALL.size : owner_at].decode(), raw[owner_at : owner_at + n_owner].decode()
    task = raw[owner_at + n_owner :].decode()
    age = now - since / 1e6 if since else 0.0
    followers = followed.get(task or call, [0])[0]
    return WaitingCall(call, owner, int(token), age, lease / 1e6 - now, timeout / 1e6 or None, followers)


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else str(reply)


def _glob(text: str) -> str:
    return "".join(f"\\{each}" if each in "*?[]\\" else each for each in text)


def _recognised(error: Exception) -> Exception:
    """Return *error*, or a :class:`RedisRefused` where its class does not show that it concerns all keys."""
    return RedisRefused(str(error)) if _REFUSES_ALL.search(str(error)) else error


class _OwnClient(redis.Redis):
    """A client whose errors show whether the server serves no request."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            raise _recognised(error) from None


class OwnRedis(RedisCoordinator):
    """A coordinator with a client of its own.

    Args:
        url: the URL of the Redis.
        options: the settings of the app.
        owner: see :class:`RedisCoordinator`.
    """

    def __init__(self, url: str, options: Options, owner: str) -> None:
        self._url = url
        lease_s = options.lease_us / 1e6
        self._patience_s = lease_s * PATIENCE
        keys = DedupKeys(options.environment, options.key_prefix)
        super().__init__(self.new_client(), keys, load_scripts(), owner=owner, lease=lease_s)

    def new_client(self) -> Any:
        """Make another client of the same server.

        It reconnects at once, and only once, because pauses between attempts would stop the event loop.
        """
        return _OwnClient.from_url(
            self._url,
            socket_timeout=self._patience_s,
            socket_connect_timeout=self._patience_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 1, (redis.ConnectionError,)),
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def redis_of(app: Any, options: Options) -> str:
    """Return the URL of the Redis that keeps the dedup locks of an app.

    Raises:
        ConfigurationError: No setting names a Redis.
    """
    broker = str(app.conf.broker_read_url or app.conf.broker_url or "")
    urls = {"dq_dedup_url": options.dedup_url, "broker_url": broker}
    for name, url in {**urls, "result_backend": str(app.conf.result_backend or "")}.items():
        if url.startswith(REDIS_URLS):
            refuse_unreadable_url(name, url)
            return url
    raise ConfigurationError(
        f"tasks of this app take part in dedup, and neither the broker ({shown_url(broker)}) nor "
        "the result backend is a Redis: set dq_dedup_url to the Redis that is to keep the dedup locks"
    )


#: Renewals per lease: two may fail before the lease ends.
RENEWALS = 3


class DedupLockHeartbeat:
    """The thread that renews the dedup locks.

    Args:
        coordinator: renews the leases.
        lease: seconds that a lease holds.
        on_turn: called from the thread when the waiting calls should be checked.
        on_lost: called from the thread with a dedup lock that this process has lost.
        subscriber: makes a redis-py client for the channel of the owner; None when there is no channel.
        on_silence: called from the thread with the error of each request without an answer.
        on_answer: called from the thread after each answer.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lease: float,
        on_turn: Callable[[], None],
        on_lost: Callable[[HeldDedupLock], None],
        subscriber: Callable[[], Any] | None,
        on_silence: Callable[[Exception], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._pause = lease / RENEWALS
        self._on_turn = on_turn
        self._on_lost = on_lost
        self._subscriber = subscriber
        self._on_silence = on_silence
        self._on_answer = on_answer
        self._trouble = Outage(logger, "dedup_renewal")
        self._holdings: set[HeldDedupLock] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, holding: HeldDedupLock) -> None:
        """Renew this dedup lock from now on."""
        self._holdings.add(holding)
        self.start()

    def start(self) -> None:
        """Start the thread unless it runs already."""
        if self._thread is None:
            self._thread = start_daemon(self._run, "dq-dedup-heartbeat")

    def drop(self, holding: HeldDedupLock) -> None:
        """Stop renewing this dedup lock."""
        self._holdings.discard(holding)

    def stop(self) -> None:
        """End the thread. Leases that are left expire."""
        self._stopped.set()
        if self._thread is not None:
            if isinstance(self._coordinator, RedisCoordinator):
                with contextlib.suppress(Exception):  # without it the thread ends at its next renewal
                    self._coordinator.wake()
            self._thread.join(5.0)

    def _run(self) -> None:
        listening: Any = None
        while not self._stopped.is_set():
            listening = self._turn(listening)

    def _turn(self, listening: Any) -> Any:
        """Renew once, and wait. Return the subscription, None after an error."""
        try:
            if listening is None and self._subscriber is not None:
                assert isinstance(self._coordinator, RedisCoordinator)
                listening = self._subscriber().pubsub(ignore_subscribe_messages=True)
                listening.subscribe(self._coordinator.channel)
            self._beat()
            self._listen(listening)
        except Exception as error:
            # Continue after every error, such as a restart of Redis: the leases have not expired yet.
            if isinstance(error, SILENCE):
                self._on_silence(error)
            else:
                self._trouble.began(
                    "This process cannot renew its dedup locks (%s: %s). They end with their leases "
                    "unless a renewal succeeds before; check the Redis of dq_dedup_url.",
                    type(error).__name__,
                    error,
                    exc_info=None if isinstance(error, redis.ResponseError) else error,
                )
                # The server answers: only the waiting calls of some keys cannot be checked.
                self._on_answer()
                self._on_turn()
            if listening is not None:
                with contextlib.suppress(Exception):
                    listening.close()
            self._stopped.wait(min(self._pause, 1.0))
            return None
        return listening

    def _beat(self) -> None:
        holdings = list(self._holdings)
        for holding, alive in zip(holdings, self._coordinator.renew(holdings), strict=True):
            if not alive and holding in self._holdings:
                self._holdings.discard(holding)
                self._on_lost(holding)
        self._trouble.over("This process renews its dedup locks again.")
        self._on_answer()
        self._on_turn()

    def _listen(self, listening: Any) -> None:
        """Wait for a wake-up, until the next renewal is due."""
        if listening is None:
            self._stopped.wait(self._pause)
            return
        if listening.get_message(timeout=self._pause) is not None:
            self._on_turn()
