"""Elections without ZooKeeper: a lease in Redis, in the slot of the queue that is led.

The rules are those of the protocol, with Redis's clock as the judge: who holds the lease leads until it
runs out, a term that has run out is never renewed, and tokens only grow. What it cannot give: Redis
replicates asynchronously. A fail-over may forget an election that was just won, so that the same token is
given to two; on ``dq-redis`` the fence lies in the same slot and is forgotten with it. Where that matters,
use ZooKeeper.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from celery_dq.errors import NotElected
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.election import Accession, Leader
from celery_dq.scripts.loader import ScriptSet

__all__ = ["RedisElection", "load_scripts"]

#: Longest wait for a vacancy at a time, as a share of the session: shorter than the client's patience.
LONGEST_WAIT = 1 / 12


def load_scripts() -> ScriptSet:
    """The scripts of the election."""
    return ScriptSet(Path(__file__).parent)


class RedisElection:
    """One candidate for one leadership; see :class:`~celery_dq.leadership.election.Election`.

    :param client: with a socket timeout, or a dead server hangs the candidate.
    :param session_s: the length of the lease in seconds; default 10.
    :param who: names the candidate for people; a unique part is added.
    """

    def __init__(self, client: Any, keys: PartitionKeys, who: str, session_s: float = 10.0) -> None:
        self.name = keys.queue
        self.who = f"{who}:{uuid.uuid4().hex[:12]}"
        self.session_s = session_s
        self.suspended = False
        self._client = client
        self._keys = keys
        self._scripts = load_scripts()
        self._token = 0
        self._vacant_in_s = 0.0

    def listen(self, bell: Callable[[], None]) -> None:
        """Nothing is heard of Redis between two requests, so there is nothing to tell."""

    def stand(self) -> bool:
        """Whether the lead is vacant; see the protocol."""
        keys = (self._keys.leader, self._keys.candidates)
        is_first, left_us = self._run("stand", keys, self.who, self.session_s)
        self._vacant_in_s = int(left_us) / 1e6
        return int(is_first) == 1

    def wait(self, timeout_s: float) -> None:
        """Wait for a resignation or for the end of the present lease."""
        patience = min(timeout_s, self._vacant_in_s + 0.02, self.session_s * LONGEST_WAIT)
        if patience > 0.01:
            try:
                self._do("BLPOP", self._keys.vacant, f"{patience:.3f}")
            except OSError:
                time.sleep(min(patience, 0.2))

    def wake(self) -> None:
        """No wait is long."""

    def accede(self, floor: int, since: float) -> Accession:
        """Take the lead; see the protocol."""
        session_ms = int(self.session_s * 1000)
        keys = (self._keys.leader, self._keys.vacant)
        token, *more = self._run("campaign", keys, self.who, session_ms, floor, f"{since:.3f}")
        if int(token) == 0:
            self._vacant_in_s = int(more[0]) / 1e6
            raise NotElected(f"somebody else was elected to lead {self.name!r}")
        self._token = int(token)
        return Accession(self._token, int(more[0]) == 1, int(more[1]))

    def renew(self) -> None:
        """Stay the leader; see the protocol."""
        keys = (self._keys.leader,)
        if int(self._run("renew", keys, self.who, self._token, int(self.session_s * 1000))) == 0:
            raise NotElected(f"the lease on {self.name!r} has run out, or somebody else has it")

    def resign(self, clean: bool) -> None:
        """Lead no more; see the protocol."""
        if self._token:
            keys = (self._keys.leader, self._keys.vacant)
            self._run("resign", keys, self.who, self._token, "1" if clean else "0")
            # Not before the answer: else to call again would say nothing.
            self._token = 0
        self._do("ZREM", self._keys.candidates, self.who)

    def standing(self) -> list[str]:
        """The leader, and all who have looked for a vacancy within the last session."""
        seconds, _ = self._do("TIME")
        leader = self.leader()
        recent = self._do("ZRANGEBYSCORE", self._keys.candidates, int(seconds) - self.session_s, "+inf")
        names = [_text(each) for each in recent]
        return names if leader is None else [leader.who, *(each for each in names if each != leader.who)]

    def leader(self) -> Leader | None:
        """Who leads; None when the lease has run out or was given back."""
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
            # A full server, or one in a fail-over, may be well again in a moment: it is as good as silent.
            self.suspended = True
            raise ConnectionError(f"Redis did not answer the election for {self.name!r}: {error}") from error
        self.suspended = False
        return answer


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
