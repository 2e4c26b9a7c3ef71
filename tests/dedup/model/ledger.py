"""The promises to every call, and its events, without heads and tails."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class Run:
    """A run. ``void``: the reason for which it lost its key. ``end``: how it ended, '' while it lasts."""

    call: str
    task: str
    key: str
    token: int
    began: int
    void: str = ""
    end: str = ""


@dataclasses.dataclass(frozen=True)
class TurnedAway:
    """A task that need not run: `by` covers it. `late`: `by` ran already, and no call was allowed to wait."""

    task: str
    at: int
    by: str
    late: bool


class Ledger:
    """Gets all events in order, and fails at the first broken promise."""

    def __init__(self) -> None:
        self.now = 0
        self.runs: list[Run] = []
        self.asked: dict[str, str] = {}
        self.turned_away: list[TurnedAway] = []
        self.gone: dict[str, str] = {}
        self.waiting: dict[str, set[str]] = {}
        self.following: dict[str, tuple[str, int]] = {}
        self.settled_by: dict[str, str] = {}
        #: The reason of runs that overlapped another run of their key -> their number.
        self.overlaps: Counter[str] = Counter()

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def run_of(self, call: str, token: int = 0) -> Run:
        """The latest run of a call, or its run with a token."""
        return next(run for run in reversed(self.runs) if run.call == call and token in (0, run.token))

    def asks(self, task: str, key: str) -> None:
        """Note that a task requests its key, for the first time or again."""
        self.asked[task] = key
        self._tick()

    def waits(self, call: str, key: str) -> None:
        """Note that a call must wait behind the one that runs."""
        waiting = self.waiting.setdefault(key, set())
        waiting.add(call)
        assert len(waiting) == 1, f"{key}: {sorted(waiting)} wait together"

    def waits_no_more(self, call: str, key: str) -> None:
        """Note the end of a wait: the call begins, was revoked, or lost its place."""
        self.waiting.get(key, set()).discard(call)

    def is_turned_away(self, task: str, by: str, *, late: bool) -> None:
        """Note that a task was declined or replaced: see :class:`TurnedAway`."""
        self.turned_away.append(TurnedAway(task, self._tick(), by, late))

    def begins(self, call: str, task: str, key: str, token: int, *, outside: bool = False) -> None:
        """Note the start of a run. `outside`: an operator has freed its key before it began."""
        at_work = [run for run in self.runs if run.key == key and not run.end]
        if not outside:
            rivals = [run.call for run in at_work if not run.void]
            assert not rivals, f"{key}: {call} begins beside {rivals}"
            tokens = [run.token for run in self.runs if run.key == key and not run.void]
            assert token > max(tokens, default=0), f"{key}: the token of {call} is not larger than {tokens}"
        self.overlaps.update(run.void for run in at_work)
        self.waits_no_more(call, key)
        void = "taken by an operator" if outside else ""
        self.runs.append(Run(call, task, key, token, self._tick(), void))

    def ends(self, call: str, how: str, *, accepted: bool, token: int = 0) -> None:
        """Note the end of a run: 'done', 'retried', 'released', 'died'. `accepted`: it had its key."""
        run = self.run_of(call, token)
        assert not run.end, f"{call} ended twice"
        assert not (accepted and run.void), f"{call} ended with the token that {run.void} made void"
        assert accepted or run.void or how == "died", f"{call} could not end, and had its key"
        run.end = how
        self._tick()

    def takes_from(self, call: str, why: str) -> None:
        """Note that a run loses its key and continues."""
        run = self.run_of(call)
        assert not run.void
        run.void = why
        self._tick()

    def excuses(self, task: str, why: str) -> None:
        """Note that a task will not run, by an order."""
        self.gone[task] = why

    def follows(self, call: str, task: str) -> None:
        """Note that a declined call is to get the result of its covering call."""
        assert call not in self.settled_by
        self.following[call] = (task, self.now)

    def receives_result(self, call: str, by: str) -> None:
        """Note that a follower gets the end of `by`, which must have run to its end, or ended for good."""
        assert call in self.following, f"{call} follows no call"
        task, since = self.following[call]
        late = any(each.late for each in self.turned_away if each.task == task)
        passed_on = any(self.following[each][0] == by for each in self.settled_by)
        assert (
            passed_on
            or by in self.gone
            or any(run.task == by and self._is_over(run) and (late or run.began > since) for run in self.runs)
        ), f"{call} is given the end of {by}, which has none"

    @staticmethod
    def _is_over(run: Run) -> bool:
        # The retry of a run that has lost its key is a new call. Followers of the run do not wait for it.
        return run.end == "done" or (run.end == "retried" and bool(run.void))

    def is_settled(self, call: str, by: str) -> None:
        """Note that a follower got that end, and its callbacks were called."""
        assert call not in self.settled_by, f"{call} was settled twice"
        self.settled_by[call] = by

    def close(self) -> None:
        assert not any(run.end == "" for run in self.runs)
        assert not any(self.waiting.values()), self.waiting
        for task in self.asked:
            assert self._is_served(task, 0, ()), f"{task} neither ran nor is covered"
        for each in self.turned_away:
            assert each.late or self._is_served(each.by, each.at, ()), (
                f"no call ran for {each} after its call"
            )
        for call, (task, _) in self.following.items():
            assert call in self.settled_by or task in self.gone, f"the follower {call} was never settled"

    def _is_served(self, task: str, since: int, seen: tuple[str, ...]) -> bool:
        """Whether it, or its covering task, ran to its end in a run that began after `since`."""
        if task in seen:
            return False
        if task in self.gone:
            return True
        if any(run.task == task and run.began > since and run.end == "done" for run in self.runs):
            return True
        covers = [each for each in self.turned_away if each.task == task]
        return any(each.late or self._is_served(each.by, since, (*seen, task)) for each in covers)
