"""Elections with Redis: a lease in the hash slot of the singleton queue.

The rules are those of the protocol, by the clock of Redis. The holder of the lease leads until the lease
expires, an expired lease is never renewed, and tokens only grow.

Redis replicates asynchronously, so a fail-over may forget an election that was just won. Then two leaders may
have the same token. On ``dq-redis``, the fence is in the same slot and may be forgotten with it. Use
ZooKeeper where this is not acceptable.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from importlib.resources import files
from typing import Any

import redis

from celery_dq.errors import NotElected
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.elector import ElectionWon, Leader
from celery_dq.outage import Outage
from celery_dq.scripts.loader import ScriptSet
from celery_dq.shown import shown_logger

__all__ = ["RedisElection", "broker_client", "forget_leadership", "led_names", "load_scripts"]

logger = shown_logger(__name__)

#: Maximum time of one wait for a vacancy, as a share of the session; shorter than the client's timeout.
LONGEST_WAIT = 1 / 12


def load_scripts() -> ScriptSet:
    """Read the scripts of the election."""
    return ScriptSet(files(__package__), "campaign", "renew", "resign", "stand")


def led_names(client: Any, leaderships: Iterable[PartitionKeys]) -> list[str]:
    """Return the names of the leaderships that ever had a leader.

    Raises:
        ConnectionError: Redis does not answer.
    """
    known = list(leaderships)
    pipeline = client.pipeline(transaction=False)
    for keys in known:
        pipeline.hget(keys.leader, "token")
    try:
        found = pipeline.execute()
    except redis.RedisError as error:
        raise ConnectionError(f"Redis did not answer the question for leaders: {error}") from error
    return [keys.queue for keys, token in zip(known, found, strict=True) if token]


def forget_leadership(client: Any, keys: PartitionKeys) -> None:
    """Remove the record of a leadership.

    Raises:
        ConnectionError: Redis does not answer.
    """
    try:
        client.delete(keys.leader, keys.candidates, keys.vacant)
    except redis.RedisError as error:
        raise ConnectionError(f"Redis did not forget the leadership {keys.queue!r}: {error}") from error


class RedisLines:
    """Reads the lines of many leaderships in one round trip. Thread-safe.

    Args:
        client: A Redis client with a socket timeout.
        keys: Returns the keys of a leadership.
        session_s: The length of the lease in seconds.

    Attributes:
        changed: False: Redis reports no changes.
    """

    changed = False

    def __init__(self, client: Any, keys: Callable[[str], PartitionKeys], session_s: float = 10.0) -> None:
        self._client = client
        self._keys = keys
        self._session_s = session_s

    def read(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return the leader, and all candidates that have looked for a vacancy within the last session."""
        seconds, micros = map(int, self._client.execute_command("TIME"))
        pipeline = self._client.pipeline(transaction=False)
        for keys in map(self._keys, names):
            pipeline.hmget(keys.leader, "who", "until")
            pipeline.zrangebyscore(keys.candidates, seconds - self._session_s, "+inf")
        answers = pipeline.execute()
        lines = {}
        for name, (who, until), line in zip(names, answers[::2], answers[1::2], strict=True):
            recent = [_text(each) for each in line]
            leader = [_text(who)] if who and int(until) > seconds * 1_000_000 + micros else []
            lines[name] = leader + [each for each in recent if each not in leader]
        return lines


class RedisElection:
    """One candidate for one leadership; see :class:`~celery_dq.leadership.elector.Election`.

    Args:
        client: A Redis client with a socket timeout; without one, a dead server would block the candidate.
        keys: The keys of the queue's partition.
        who: A readable name of the candidate; a unique suffix is added.
        session_s: The length of the lease in seconds; default 10.
        outage: Shared by the candidates with this client; default a new one.
    """

    def __init__(
        self,
        client: Any,
        keys: PartitionKeys,
        who: str,
        session_s: float = 10.0,
        outage: Outage | None = None,
    ) -> None:
        self.name = keys.queue
        self.who = f"{who}:{uuid.uuid4().hex[:12]}"
        self.session_s = session_s
        self.outage = outage or Outage(logger, "election_outage")
        self.suspended = False
        self._client = client
        self._keys = keys
        self._scripts = load_scripts()
        self._token = 0
        self._vacant_in_s = 0.0

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        """Do nothing: between two requests, Redis reports no change of the connection."""

    def become_candidate(self) -> bool:
        """Become or stay a candidate; return whether the leadership is vacant."""
        keys = (self._keys.leader, self._keys.candidates)
        is_first, left_us = self._run("stand", keys, self.who, self.session_s)
        self._vacant_in_s = int(left_us) / 1e6
        return int(is_first) == 1

    def wait(self, timeout_s: float) -> None:
        """Wait for a resignation or for the end of the current lease."""
        patience = min(timeout_s, self._vacant_in_s + 0.02, self.session_s * LONGEST_WAIT)
        if patience > 0.01:
            try:
                self._do("BLPOP", self._keys.vacant, f"{patience:.3f}")
            except OSError:
                time.sleep(min(patience, 0.2))

    def wake(self) -> None:
        """Do nothing: no wait is long."""

    def accept(self, floor: int, since: float) -> ElectionWon:
        """Become the leader; see the protocol."""
        session_ms = int(self.session_s * 1000)
        keys = (self._keys.leader, self._keys.vacant)
        token, *more = self._run("campaign", keys, self.who, session_ms, floor, f"{since:.3f}")
        if int(token) == 0:
            self._vacant_in_s = int(more[0]) / 1e6
            raise NotElected(f"another candidate was elected to lead {self.name!r}")
        self._token = int(token)
        return ElectionWon(self._token, int(more[0]) == 1, int(more[1]))

    def renew(self) -> None:
        """Stay the leader; see the protocol."""
        keys = (self._keys.leader,)
        if int(self._run("renew", keys, self.who, self._token, int(self.session_s * 1000))) == 0:
            raise NotElected(f"the lease on {self.name!r} has expired, or another candidate has it")

    def resign(self, clean: bool) -> None:
        """End the leadership and the candidacy; see the protocol."""
        if self._token:
            keys = (self._keys.leader, self._keys.vacant)
            self._run("resign", keys, self.who, self._token, "1" if clean else "0")
            # Reset only after the answer, so that a repeated call resigns again.
            self._token = 0
        self._do("ZREM", self._keys.candidates, self.who)

    def candidates(self) -> list[str]:
        """Return the leader, and all candidates that have looked for a vacancy within the last session."""
        lines = RedisLines(self._client, lambda _: self._keys, self.session_s)
        names: list[str] = self._guarded(lambda: lines.read([self.name]))[self.name]
        return names

    def leader(self) -> Leader | None:
        """Return the current leader; None if the lease has expired or was released."""
        who, token, since, until = self._do("HMGET", self._keys.leader, "who", "token", "since", "until")
        seconds, micros = self._do("TIME")
        if who is None or int(until) <= int(seconds) * 1_000_000 + int(micros):
            return None
        return Leader(_text(who), int(token), float(since))

    # -- inside

    def _do(self, *command: Any) -> Any:
        return self._guarded(lambda: self._client.execute_command(*command))

    def _run(self, script: str, keys: tuple[str, ...], *args: Any) -> Any:
        return self._guarded(lambda: self._scripts[script].run(self._client, keys, args))

    def _guarded(self, call: Any) -> Any:
        try:
            answer = call()
        except redis.RedisError as error:
            # Any error counts as no answer: a server that is full or in a fail-over may recover soon.
            self.suspended = True
            raise ConnectionError(f"Redis did not answer the election for {self.name!r}: {error}") from error
        self.suspended = False
        return answer


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def broker_client(app: Any, timeout_s: float) -> Any:
    """Make a client of the broker's Redis whose calls fail after `timeout_s` seconds without an answer."""
    with app.connection_for_write() as connection:
        return connection.default_channel.own_clients(timeout_s)()
