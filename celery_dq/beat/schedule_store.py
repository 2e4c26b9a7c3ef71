"""The state that elected beats share: the last run of each entry of the schedule, and its pending tick.

A tick gets a number *before* it is sent. The number stays the same for every beat until the tick is recorded
as sent. A new leader that takes over before the record sends the same tick under the same number. A
``dq-redis`` broker refuses the duplicate; with other brokers, the receiver can recognise it by its task id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

import redis

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import Fenced
from celery_dq.scripts.loader import ScriptSet
from celery_dq.znodes import BeatNodes

__all__ = [
    "ScheduleStore",
    "Known",
    "LastRun",
    "RedisScheduleStore",
    "ZooKeeperScheduleStore",
    "load_scripts",
    "micros",
]

#: Maximum number of entries of one call.
CHUNK = 500
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class LastRun(NamedTuple):
    """The last run of an entry.

    Attributes:
        at: Its time, as Celery stores it.
        runs: Number of runs so far.
    """

    at: datetime
    runs: int


class Known(NamedTuple):
    """The last run of an entry as a beat knows it.

    Attributes:
        ran: Time of the last run, or the time since which the entry waits for its first run.
        latest: The latest such time that the beat accepts from the store.
    """

    ran: datetime
    latest: datetime


class ScheduleStore(Protocol):
    """The store of the state that beats share. Every call raises OSError if the server does not answer.

    The state of an entry that cannot be read counts as missing: one entry must not stop the others.

    Attributes:
        kind: The server, for texts.
    """

    kind: str

    def token(self) -> int:
        """Return the highest token in the store, for the case of a new election; 0 if there is none."""

    def adopt(self, token: int, entries: Mapping[str, Known]) -> dict[str, LastRun]:
        """Take over the schedule; see ``adopt.lua``.

        Args:
            token: The fencing token of the term.
            entries: The entries of the schedule, by name.

        Returns:
            The last run of each entry.

        Raises:
            Fenced: A later leader has taken over.
        """

    def retain(self, token: int, entries: Collection[str]) -> None:
        """Remove the state of all entries but these.

        Args:
            token: The fencing token of the term.
            entries: The names of all entries of the schedule.

        Raises:
            Fenced: A later leader has taken over.
        """

    def begin(self, token: int, entry: str, ran: datetime) -> int | LastRun:
        """Number the next tick of an entry; see ``begin.lua``.

        Args:
            token: The fencing token of the term.
            entry: Name of the entry.
            ran: Time of its last run, as the caller knows it.

        Returns:
            The number of the tick; or the last run, if it is later than `ran`.

        Raises:
            Fenced: A later leader has taken over.
        """

    def done(self, token: int, entry: str, number: int, ran: LastRun) -> None:
        """Record that a tick was sent; see ``done.lua``. Does nothing if the tick is not pending any more.

        Args:
            token: The fencing token of the term.
            entry: Name of the entry.
            number: Number of the tick.
            ran: The run that the tick makes.
        """

    def close(self) -> None:
        """Close the connection to the store."""


def load_scripts() -> ScriptSet:
    """Read the scripts of the store."""
    return ScriptSet(files(__package__), "adopt", "begin", "done", "retain")


def micros(time: datetime) -> int:
    """Convert `time` to µs since 1970; a time without a zone is UTC, as in Celery."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    return (time - EPOCH) // timedelta(microseconds=1)


class RedisScheduleStore:
    """A store in a Redis hash.

    Args:
        client: A Redis client with a socket timeout.
        key: Key of the hash.
    """

    kind = "Redis"

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key
        self._scripts = load_scripts()

    def token(self) -> int:
        """See :class:`ScheduleStore`."""
        return int(self._answer(lambda: self._client.hget(self._key, "token")) or 0)

    def adopt(self, token: int, entries: Mapping[str, Known]) -> dict[str, LastRun]:
        """See :class:`ScheduleStore`."""
        known: dict[str, LastRun] = {}
        for chunk in _chunks(list(entries)) if entries else [[]]:
            arguments: list[Any] = []
            for name in chunk:
                arguments.append(name)
                for time in entries[name]:
                    arguments += (micros(time), _text(time))
            reply = self._run("adopt", token, *arguments)
            known.update(
                (name, LastRun(_time(reply[1 + 2 * at]), int(reply[2 + 2 * at])))
                for at, name in enumerate(chunk)
            )
        return known

    def retain(self, token: int, entries: Collection[str]) -> None:
        """See :class:`ScheduleStore`."""
        fields = self._answer(lambda: self._client.hkeys(self._key))
        stored = (field.decode() if isinstance(field, bytes) else field for field in fields)
        gone = [field[2:] for field in stored if field[:2] == "e:" and field[2:] not in entries]
        for chunk in _chunks(gone):
            self._run("retain", token, *chunk)

    def begin(self, token: int, entry: str, ran: datetime) -> int | LastRun:
        """See :class:`ScheduleStore`."""
        kind, *stored = self._run("begin", token, entry, micros(ran), _text(ran))
        return int(stored[0]) if int(kind) == 1 else LastRun(_time(stored[0]), int(stored[1]))

    def done(self, token: int, entry: str, number: int, ran: LastRun) -> None:
        """See :class:`ScheduleStore`."""
        self._run("done", token, entry, number, micros(ran.at), ran.runs, _text(ran.at))

    def close(self) -> None:
        """See :class:`ScheduleStore`."""
        self._client.close()

    def _run(self, script: str, *args: Any) -> Any:
        reply = self._answer(lambda: self._scripts[script].run(self._client, (self._key,), args))
        if isinstance(reply, list) and int(reply[0]) == 0:
            raise Fenced(f"a later beat leads, with token {int(reply[1])} above this beat's {args[0]}")
        return reply

    @staticmethod
    def _answer(request: Callable[[], Any]) -> Any:
        try:
            return request()
        except redis.RedisError as error:
            raise ConnectionError(f"Redis did not answer the beat: {error}") from error


class ZooKeeperScheduleStore:
    """A store with one node per entry, for elections with ZooKeeper and a broker that is not Redis.

    Args:
        session: The session of the election.
        nodes: The nodes of the entries.
        clock: Wall time, for the numbers of ticks.
    """

    kind = "ZooKeeper"

    def __init__(self, session: Any, nodes: BeatNodes, clock: Clock | None = None) -> None:
        self._session = session
        self._nodes = nodes
        self._clock: Clock = clock or SystemClock()

    def token(self) -> int:
        """Return 0: the election keeps its tokens in the same ensemble."""
        return 0

    def adopt(self, token: int, entries: Mapping[str, Known]) -> dict[str, LastRun]:
        """See :class:`ScheduleStore`."""
        from kazoo.exceptions import NoNodeError

        from celery_dq.zookeeper.transaction import create, set_data

        known, steps = {}, []
        self._ask(lambda client: client.ensure_path_async(self._nodes.path))
        for name, answer in self._read_all(entries):
            ran, latest = entries[name]
            is_new = isinstance(answer, NoNodeError)
            stored = _stored(b"" if is_new else answer[0], token, ran)
            if stored["ran_us"] > micros(latest):
                stored |= {"ran_us": micros(latest), "ran": _text(latest)}
            # The token in each node refuses an earlier leader.
            path, data = self._nodes.entry(name), json.dumps({**stored, "token": token}).encode()
            steps.append(create(path, data) if is_new else set_data(path, data, answer[1].version))
            known[name] = LastRun(_time(stored["ran"]), stored["runs"])
        self._transact(steps)
        return known

    def retain(self, token: int, entries: Collection[str]) -> None:
        """See :class:`ScheduleStore`."""
        from kazoo.exceptions import NoNodeError

        from celery_dq.zookeeper.transaction import delete

        children = self._ask(lambda client: client.get_children_async(self._nodes.path))
        gone = [name for name in map(self._nodes.entry_of, children) if name not in entries]
        steps = []
        for name, answer in self._read_all(gone):
            if not isinstance(answer, NoNodeError):
                _stored(answer[0], token, EPOCH)
                steps.append(delete(self._nodes.entry(name), answer[1].version))
        self._transact(steps)

    def begin(self, token: int, entry: str, ran: datetime) -> int | LastRun:
        """See :class:`ScheduleStore`."""
        stored, version = self._read(token, entry, ran)
        if stored["sent"] and stored["ran_us"] > micros(ran):
            return LastRun(_time(stored["ran"]), stored["runs"])
        if stored["pending"] and stored["ran_us"] < micros(ran):
            # The pending tick was sent, though its record is missing.
            stored |= {"sent": stored["pending"], "pending": 0, "ran_us": micros(ran), "ran": _text(ran)}
        if not stored["pending"]:
            stored["pending"] = max(stored["sent"] + 1, int(self._clock.wall() * 1e6))
        self._write(entry, {**stored, "token": token}, version)
        return int(stored["pending"])

    def done(self, token: int, entry: str, number: int, ran: LastRun) -> None:
        """See :class:`ScheduleStore`."""
        stored, version = self._read(token, entry, ran.at)
        if stored["pending"] == number:
            update = {"pending": 0, "sent": number, "runs": ran.runs}
            self._write(entry, {**stored, **update, "ran_us": micros(ran.at), "ran": _text(ran.at)}, version)

    def close(self) -> None:
        """Do nothing: the session belongs to the election."""

    def _read(self, token: int, entry: str, ran: datetime) -> tuple[dict[str, Any], int]:
        from kazoo.exceptions import NodeExistsError, NoNodeError

        path = self._nodes.entry(entry)

        def read() -> Any:
            return self._ask(lambda client: client.get_async(path))

        try:
            data, stat = read()
        except NoNodeError:
            first = json.dumps(_stored(b"", token, ran)).encode()
            with contextlib.suppress(NodeExistsError):
                self._ask(lambda client: client.create_async(path, first, makepath=True))
            data, stat = read()
        return _stored(data, token, ran), stat.version

    def _read_all(self, entries: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield for each entry the data and stat of its node, or that it has none."""
        from kazoo.exceptions import NoNodeError

        from celery_dq.zookeeper.multi_read import read_all

        for chunk in _chunks(list(entries)):
            answers = read_all(self._session, [self._nodes.entry(name) for name in chunk], self._patience_s)
            for name, answer in zip(chunk, answers, strict=True):
                if isinstance(answer, Exception) and not isinstance(answer, NoNodeError):
                    raise answer
                yield name, answer

    def _write(self, entry: str, stored: dict[str, Any], version: int) -> None:
        from celery_dq.zookeeper.transaction import set_data

        self._transact([set_data(self._nodes.entry(entry), json.dumps(stored).encode(), version)])

    def _transact(self, steps: list[Any]) -> None:
        from celery_dq.zookeeper.transaction import TransactionRefused, batches, transact

        for batch in batches(steps):
            try:
                transact(self._session, batch, self._patience_s)
            except TransactionRefused as error:  # noqa: PERF203 - a hundred entries at a time
                raise Fenced(f"another beat has changed an entry at the same time: {error}") from None

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        return self._session.ask(request, self._patience_s)

    @property
    def _patience_s(self) -> float:
        return float(self._session.timeout_s) / 2


def _stored(data: bytes, token: int, ran: datetime) -> dict[str, Any]:
    """Return the state of an entry in a node; of a new entry if there is none, or it cannot be read.

    Raises:
        Fenced: A later leader has written the node.
    """
    stored: dict[str, Any] = {"token": token, "pending": 0, "sent": 0, "runs": 0}
    stored |= {"ran_us": micros(ran), "ran": _text(ran)}
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(data)
        _time(found["ran"])
        stored = {key: type(first)(found[key]) for key, first in stored.items()}
    if stored["token"] > token:
        raise Fenced(f"a later beat leads, with token {stored['token']} above this beat's {token}")
    return stored


def _chunks(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), CHUNK):
        yield names[start : start + CHUNK]


def _text(time: datetime) -> str:
    return time.isoformat()


def _time(text: Any) -> datetime:
    return datetime.fromisoformat(text.decode() if isinstance(text, bytes) else text)
