"""Find violations of the dedup rules in the journal of the hammer, independently of the scripts.

The journal has the order of one counter and the times of one clock. An event is written a little after it
happened. A run begins between *asked* and its ``start``, and may end after its ``end`` by the duration of
the reply.

A worker that does not renew its lease in time is taken for dead, though the process may only be stopped.
Another run may then begin beside its own. Such an overlap, or one by an eviction, is *forced*, and counted.
The journal must prove it. Either the worker got the answer ``stale``, or more than a lease is between two
of its renewals, or between the last one and its kill. An evicted run must have lasted longer than its
timeout.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Event", "Verdict", "judge"]


class Event(NamedTuple):
    """One line of the journal.

    ``what`` is one of these. The broker's answer to a push: accepted, blocked, declined (with ``made``,
    ``covering`` and ``replaced``). A worker's thread: start, end or stale (with ``claim``, ``worker``,
    ``asked`` and ``asked_at``). A worker's process: renewed (with ``sent``). The process that kills a
    worker: dying and dead. ``at`` is in microseconds.
    """

    number: int
    at: int
    what: str
    key: str
    call: str
    more: dict[str, Any]


@dataclass
class Verdict:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    #: The reason of forced overlaps -> their number.
    forced: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        seen = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        why = ", ".join(f"{count} by {name}" for name, count in sorted(self.forced.items())) or "none"
        return "\n".join([seen, f"forced overlaps: {why}", *self.wrong[:20], f"{len(self.wrong)} violations"])


class Silences:
    """The times in which a worker did not renew its lease for longer than the lease."""

    def __init__(self, lease_us: int) -> None:
        self._lease_us = lease_us
        self._last: dict[str, int] = {}
        self._gaps: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def add_renewal(self, worker: str, sent: int, at: int) -> None:
        last = self._last.get(worker)
        if last is not None and at - last > self._lease_us:
            self._gaps[worker].append((last, at))
        self._last[worker] = sent

    def during(self, since: int, until: int, worker: str | None = None) -> bool:
        """Whether this worker, or any worker, was silent at a time between these two."""
        for gaps in [self._gaps[worker]] if worker is not None else self._gaps.values():
            at = bisect.bisect_left(gaps, since, key=lambda gap: gap[1])
            if at < len(gaps) and gaps[at][0] <= until:
                return True
        return False

    def count(self) -> int:
        return sum(map(len, self._gaps.values()))


class Facts:
    """The results of the first reading of the journal, for the second one."""

    def __init__(self, events: Iterable[Event], lease_us: int) -> None:
        self.silences = Silences(lease_us)
        self.stale: set[tuple[str, int]] = set()
        self.begun: dict[str, int] = {}  # call -> its last start
        self.last: dict[str, int] = {}  # key -> the last start of all
        self.gave_way: dict[str, str] = {}
        self.deaths: list[tuple[int, int]] = []
        dying: dict[str, int] = {}
        for number, at, what, key, call, more in events:
            if what == "start":
                self.begun[call] = self.last[key] = number
            elif what == "stale":
                self.stale.add((call, more["claim"]))
            elif what == "renewed":
                self.silences.add_renewal(call, more["sent"], at)
            elif what == "dying":
                dying[call] = number
            elif what == "dead":
                self.silences.add_renewal(call, at, at)
                self.deaths.append((dying.pop(call), number))
            if more.get("replaced"):
                self.gave_way[more["replaced"]] = call

    def died_between(self, since: int, until: int) -> bool:
        return any(dying < until and dead > since for dying, dead in self.deaths)


def judge(events: Iterable[Event], *, lease_us: int = 1_000_000, timeout_us: int = 0) -> Verdict:
    """Judge a journal, in two readings.

    Args:
        events: in the order of their numbers; iterable more than once.
        lease_us: how long a worker may be silent.
        timeout_us: how long a run may take before the next one evicts it; 0 is without a limit.
    """
    facts = Facts(events, lease_us)
    court = _Court(facts, timeout_us)
    for event in events:
        court.verdict.counts[event.what] += 1
        court.add(event)
    court.verdict.wrong += court.two_waiting()
    court.verdict.counts["silences"] = facts.silences.count()
    return court.verdict


class _Court:
    def __init__(self, facts: Facts, timeout_us: int) -> None:
        self.verdict = Verdict()
        self._facts = facts
        self._timeout_us = timeout_us
        self._running: dict[str, dict[str, Event]] = defaultdict(dict)  # key -> call -> its start
        self._token: dict[str, int] = {}
        self._doomed: set[str] = set()
        self._begin: dict[str, tuple[str, int, int]] = {}
        self._end: dict[str, tuple[int, int]] = {}

    def add(self, event: Event) -> None:
        number, at, what, key, call, more = event
        if what == "start":
            self._start(event)
            self._end.setdefault(call, (more["asked"], at))
        elif what == "end":
            self._running[key].pop(call, None)
        elif what == "dying":
            # From now on the worker, and with it its lease, may end at any moment.
            self._doomed.add(call)
        elif what == "blocked":
            self._begin[call] = (key, number, at)
        elif what == "declined":
            self._declined(event, more["covering"], more["made"])
        if more.get("replaced"):
            there = self._end.get(more["replaced"], (number, at))
            self._end[more["replaced"]] = min((more["made"], at), there)

    # -- never two running

    def _start(self, event: Event) -> None:
        number, at, _, key, call, more = event
        running, facts, mine = self._running[key], self._facts, (call, more["claim"])
        late = mine in facts.stale or facts.silences.during(more["asked_at"], at, more["worker"])
        if late and (running or more["claim"] <= self._token.get(key, 0)):
            # The worker lost its lease before it reported the start: the run does not count.
            self.verdict.forced["a lost lease"] += 1
            return
        for other, begun in list(running.items()):
            why = self._excuse(begun, event)
            if why is None:
                self.verdict.wrong.append(
                    f"{number}: {call} starts on {key} while {other} runs on {begun.more['worker']}, since "
                    f"{begun.number}"
                )
            else:
                self.verdict.forced[why] += 1
            if why == "an eviction" and more["claim"] < begun.more["claim"]:
                return  # this run was evicted before it reported its start
            del running[other]
        if more["claim"] <= self._token.get(key, 0) and not self._timeout_us:
            self.verdict.wrong.append(
                f"{number}: {call} has token {more['claim']} on {key}, which had {self._token[key]}"
            )
        self._token[key] = max(more["claim"], self._token.get(key, 0))
        running[call] = event

    def _excuse(self, begun: Event, event: Event) -> str | None:
        """The reason for which a run may begin before the reported end of another one; None without one."""
        worker = begun.more["worker"]
        if worker in self._doomed:
            return "a kill"
        if (begun.call, begun.more["claim"]) in self._facts.stale:
            return "a lost lease"
        if self._facts.silences.during(begun.more["asked_at"], event.at, worker):
            return "a lost lease"
        evicted = min(begun, event, key=lambda each: each.more["claim"])
        if self._timeout_us and event.at - evicted.more["asked_at"] >= self._timeout_us:
            return "an eviction"
        return None

    # -- no lost update

    def _declined(self, event: Event, covering: str, made: int) -> None:
        facts = self._facts
        while covering in facts.gave_way:
            covering = facts.gave_way[covering]
        began = facts.begun.get(covering)
        if began is not None and began > made:
            return
        evicted = self._timeout_us and began is None and (facts.deaths or facts.silences.count())
        if evicted and facts.last.get(event.key, 0) > made:
            # A worker claimed the covering call and died without a report. The waiting call covers it after
            # the eviction.
            self.verdict.counts["covered again"] += 1
            return
        self.verdict.wrong.append(
            f"{event.call}, made at {made}, is covered by {covering}, which began {began or 'never'}"
        )

    # -- never two waiting

    def two_waiting(self) -> list[str]:
        """Find two calls that wait for one key at the same time.

        A tail waits from the answer to its push until a worker requests it, or its replacement is made. A
        call that a worker had claimed without a report, when it was killed or taken for dead, cannot be
        judged.
        """
        wrong = []
        last: dict[str, tuple[int, int, str]] = {}
        for call, (key, number, _) in sorted(self._begin.items(), key=lambda each: each[1][1]):
            end, end_at = self._end.get(call, (0, 0))
            if end <= number:
                continue  # the answer was written so late that the call waited no longer
            until, until_at, other = last.get(key, (0, 0, ""))
            if until > number:
                since, since_at = self._begin[other][1:]
                if self._facts.died_between(since, until) or self._facts.silences.during(since_at, until_at):
                    self.verdict.counts["waiting, not judged"] += 1
                else:
                    wrong.append(f"{number}: {call} waits on {key} while {other} does, until {until}")
            last[key] = max(last.get(key, (0, 0, "")), (end, end_at, call))
        return wrong
