"""What became of every call, and what was promised of it. Knows nothing of heads and tails."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class Run:
    """A call at work. ``void``: why the key was taken from it. ``end``: how it ended, '' while it goes on."""

    call: str
    task: str
    key: str
    token: int
    began: int
    void: str = ""
    end: str = ""


@dataclasses.dataclass(frozen=True)
class TurnedAway:
    """A task that need not run: `by` covers it. `late`: `by` ran already, and nobody was to wait."""

    task: str
    at: int
    by: str
    late: bool


class Ledger:
    """Is told what happens, in order, and objects."""

    def __init__(self) -> None:
        self.now = 0
        self.runs: list[Run] = []
        self.asked: dict[str, str] = {}
        self.turned_away: list[TurnedAway] = []
        self.gone: dict[str, str] = {}
        self.waiting: dict[str, set[str]] = {}
        self.following: dict[str, tuple[str, int]] = {}
        self.told: dict[str, str] = {}
        #: Runs that went on beside another one of their key, by why.
        self.overlaps: Counter[str] = Counter()

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def run_of(self, call: str, token: int = 0) -> Run:
        """The latest run of a call, or that with a token."""
        return next(run for run in reversed(self.runs) if run.call == call and token in (0, run.token))

    def asks(self, task: str, key: str) -> None:
        """A task wants its key, for the first time or once more."""
        self.asked[task] = key
        self._tick()

    def waits(self, call: str, key: str) -> None:
        """A call was told to wait behind the one that runs."""
        waiting = self.waiting.setdefault(key, set())
        waiting.add(call)
        assert len(waiting) == 1, f"{key}: {sorted(waiting)} wait together"

    def waits_no_more(self, call: str, key: str) -> None:
        """It begins, gave up, or lost its place."""
        self.waiting.get(key, set()).discard(call)

    def is_turned_away(self, task: str, by: str, *, late: bool) -> None:
        """A task was declined or replaced: see :class:`TurnedAway`."""
        self.turned_away.append(TurnedAway(task, self._tick(), by, late))

    def begins(self, call: str, task: str, key: str, token: int, *, outside: bool = False) -> None:
        """A call begins to run. `outside`: an operator has taken its key before it began."""
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
        """A run ends: 'done', 'retried', 'given back', 'died'. `accepted`: it had its key till then."""
        run = self.run_of(call, token)
        assert not run.end, f"{call} ended twice"
        assert not (accepted and run.void), f"{call} ended with the token that {run.void} made void"
        assert accepted or run.void or how == "died", f"{call} could not end, and had its key"
        run.end = how
        self._tick()

    def takes_from(self, call: str, why: str) -> None:
        """A run loses its key while it goes on."""
        run = self.run_of(call)
        assert not run.void
        run.void = why
        self._tick()

    def excuses(self, task: str, why: str) -> None:
        """A task that will not run, by somebody's order."""
        self.gone[task] = why

    def follows(self, call: str, task: str) -> None:
        """A declined call is to get the result of whom covers it."""
        assert call not in self.told
        self.following[call] = (task, self.now)

    def hears(self, call: str, by: str) -> None:
        """A follower is given the end of `by`, which must have one: it ran to an end, or gave up for good."""
        assert call in self.following, f"{call} follows nobody"
        task, since = self.following[call]
        late = any(each.late for each in self.turned_away if each.task == task)
        passed_on = any(self.following[each][0] == by for each in self.told)
        assert (
            passed_on
            or by in self.gone
            or any(run.task == by and self._is_over(run) and (late or run.began > since) for run in self.runs)
        ), f"{call} is given the end of {by}, which has none"

    @staticmethod
    def _is_over(run: Run) -> bool:
        # The retry of a run that has lost its key is a call like any other: it is not what was waited for.
        return run.end == "done" or (run.end == "retried" and bool(run.void))

    def is_settled(self, call: str, by: str) -> None:
        """It was given that, and its callbacks have fired."""
        assert call not in self.told, f"{call} was settled twice"
        self.told[call] = by

    def close(self) -> None:
        """All is over: is every promise kept?"""
        assert not any(run.end == "" for run in self.runs)
        assert not any(self.waiting.values()), self.waiting
        for task in self.asked:
            assert self._is_served(task, 0, ()), f"{task} neither ran nor is covered"
        for each in self.turned_away:
            assert each.late or self._is_served(each.by, each.at, ()), f"nobody ran for {each} after its call"
        for call, (task, _) in self.following.items():
            assert call in self.told or task in self.gone, f"the follower {call} was never settled"

    def _is_served(self, task: str, since: int, seen: tuple[str, ...]) -> bool:
        """Whether it, or who covers it, ran to an end in a run that began after `since`."""
        if task in seen:
            return False
        if task in self.gone:
            return True
        if any(run.task == task and run.began > since and run.end == "done" for run in self.runs):
            return True
        covers = [each for each in self.turned_away if each.task == task]
        return any(each.late or self._is_served(each.by, since, (*seen, task)) for each in covers)
