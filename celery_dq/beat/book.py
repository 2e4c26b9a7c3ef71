"""What elected beats share: when each entry of the schedule ran last, and which of its ticks is to be sent.

A tick has a number, given *before* it is sent and the same for whoever sends it, until somebody has said that
it was sent. So a leader that comes between the sending and the saying sends the same tick under the same
number, which a tenant broker refuses and everybody else can recognise by its id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import redis

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import Fenced
from celery_dq.scripts.loader import ScriptSet

__all__ = ["Book", "Ran", "RedisBook", "ZooKeeperBook", "load_scripts", "micros"]

#: How many entries one call takes over.
CHUNK = 500
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Ran(NamedTuple):
    """When an entry ran last, as Celery keeps it, and how often in all."""

    at: datetime
    runs: int


class Book(Protocol):
    """Where beats keep what they share. Raises OSError when there was no answer."""

    def token(self) -> int:
        """The highest token it has seen from where another election may not have been; 0 for none."""

    def adopt(self, token: int, entries: Mapping[str, datetime]) -> dict[str, Ran]:
        """Take over; see ``adopt.lua``. Raises Fenced."""

    def begin(self, token: int, entry: str, ran: datetime) -> int | Ran:
        """The number of the next tick, or when it has run since; see ``begin.lua``. Raises Fenced."""

    def done(self, token: int, entry: str, number: int, ran: Ran) -> None:
        """That tick was sent; see ``done.lua``. Does nothing when others have said so."""

    def close(self) -> None:
        """Give back what connects to it."""


def load_scripts() -> ScriptSet:
    """The scripts of the book."""
    return ScriptSet(Path(__file__).parent)


def micros(time: datetime) -> int:
    """`time` in µs since 1970; without a zone it is that of this machine."""
    if time.tzinfo is None:
        time = time.astimezone()
    return (time - EPOCH) // timedelta(microseconds=1)


class RedisBook:
    """In a hash.

    :param client: with a socket timeout.
    :param key: of the hash.
    """

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key
        self._scripts = load_scripts()

    def token(self) -> int:
        """See :class:`Book`."""
        try:
            return int(self._client.hget(self._key, "token") or 0)
        except redis.RedisError as error:
            raise ConnectionError(f"Redis did not answer the beat: {error}") from error

    def adopt(self, token: int, entries: Mapping[str, datetime]) -> dict[str, Ran]:
        """See :class:`Book`."""
        known: dict[str, Ran] = {}
        names = list(entries)
        for start in range(0, max(len(names), 1), CHUNK):
            chunk = names[start : start + CHUNK]
            told = [each for name in chunk for each in (name, micros(entries[name]), _text(entries[name]))]
            reply = self._run("adopt", token, *told)
            known.update(
                (name, Ran(_time(reply[1 + 2 * at]), int(reply[2 + 2 * at]))) for at, name in enumerate(chunk)
            )
        return known

    def begin(self, token: int, entry: str, ran: datetime) -> int | Ran:
        """See :class:`Book`."""
        kind, *told = self._run("begin", token, entry, micros(ran), _text(ran))
        return int(told[0]) if int(kind) == 1 else Ran(_time(told[0]), int(told[1]))

    def done(self, token: int, entry: str, number: int, ran: Ran) -> None:
        """See :class:`Book`."""
        self._run("done", token, entry, number, micros(ran.at), ran.runs, _text(ran.at))

    def close(self) -> None:
        """See :class:`Book`."""
        self._client.close()

    def _run(self, script: str, *args: Any) -> Any:
        try:
            reply = self._scripts[script].run(self._client, (self._key,), args)
        except redis.RedisError as error:
            raise ConnectionError(f"Redis did not answer the beat: {error}") from error
        if isinstance(reply, list) and int(reply[0]) == 0:
            raise Fenced(f"a later beat leads, with token {int(reply[1])}; ours is {args[0]}")
        return reply


class ZooKeeperBook:
    """A node per entry: for elections by ZooKeeper on a broker that is no Redis.

    :param session: the one of the election.
    :param path: the path of an entry's node.
    """

    def __init__(self, session: Any, path: Callable[[str], str], clock: Clock | None = None) -> None:
        self._session = session
        self._path = path
        self._clock: Clock = clock or SystemClock()

    def token(self) -> int:
        """None: the election counts in the same ensemble."""
        return 0

    def adopt(self, token: int, entries: Mapping[str, datetime]) -> dict[str, Ran]:
        """See :class:`Book`."""
        known = {}
        for name, ran in entries.items():
            told, version = self._read(token, name, ran)
            # Writing the token into each is what keeps an earlier leader out.
            self._write(name, {**told, "token": token}, version)
            known[name] = Ran(_time(told["ran"]), told["runs"])
        return known

    def begin(self, token: int, entry: str, ran: datetime) -> int | Ran:
        """See :class:`Book`."""
        told, version = self._read(token, entry, ran)
        if told["ran_us"] > micros(ran):
            return Ran(_time(told["ran"]), told["runs"])
        if not told["pending"]:
            told["pending"] = max(told["sent"] + 1, int(self._clock.wall() * 1e6))
        self._write(entry, {**told, "token": token}, version)
        return int(told["pending"])

    def done(self, token: int, entry: str, number: int, ran: Ran) -> None:
        """See :class:`Book`."""
        told, version = self._read(token, entry, ran.at)
        if told["pending"] == number:
            said = {"pending": 0, "sent": number, "runs": ran.runs}
            self._write(entry, {**told, **said, "ran_us": micros(ran.at), "ran": _text(ran.at)}, version)

    def close(self) -> None:
        """The session belongs to the election."""

    def _read(self, token: int, entry: str, ran: datetime) -> tuple[dict[str, Any], int]:
        from kazoo.exceptions import NodeExistsError, NoNodeError

        path, patience_s = self._path(entry), self._session.timeout_s / 2

        def read() -> Any:
            return self._session.ask(lambda client: client.get_async(path), patience_s)

        try:
            data, stat = read()
        except NoNodeError:
            first: dict[str, Any] = {"token": token, "pending": 0, "sent": 0, "runs": 0}
            first |= {"ran_us": micros(ran), "ran": _text(ran)}
            with contextlib.suppress(NodeExistsError):
                self._session.ask(
                    lambda client: client.create_async(path, json.dumps(first).encode(), makepath=True),
                    patience_s,
                )
            data, stat = read()
        told: dict[str, Any] = json.loads(data)
        if told["token"] > token:
            raise Fenced(f"a later beat leads, with token {told['token']}; ours is {token}")
        return told, stat.version

    def _write(self, entry: str, told: dict[str, Any], version: int) -> None:
        from kazoo.exceptions import BadVersionError

        path, data = self._path(entry), json.dumps(told).encode()
        try:
            self._session.ask(
                lambda client: client.set_async(path, data, version=version), self._session.timeout_s / 2
            )
        except BadVersionError:
            raise Fenced(f"another beat has written {entry!r} at the same time") from None


def _text(time: datetime) -> str:
    return time.isoformat()


def _time(text: Any) -> datetime:
    return datetime.fromisoformat(text.decode() if isinstance(text, bytes) else text)
