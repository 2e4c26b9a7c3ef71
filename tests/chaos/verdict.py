"""The verdict on a broker, computed from the ledger, the publishes and the faults. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from tests.chaos.faults import EXCUSES, HITS_ALL, KILL, Fault
from tests.chaos.ledger import Entry
from tests.chaos.load import Published

#: Seconds after a task's end in which its ack must reach the broker. A fault that hits the worker in this
#: time may rightly cause a redelivery.
ACK_ALLOWANCE = 1.0

#: Seconds that a worker needs to notice a broken connection and to reconnect.
RECONNECT_ALLOWANCE = 4.0

#: Seconds before a failover in which a confirmation of the lost master does not mean that its replica had the
#: message. On one machine replication takes milliseconds.
REPLICATION_ALLOWANCE = 1.0

#: Seconds for which the children of a killed worker may run the messages in their pipes.
ORPHAN_ALLOWANCE = 1.0

#: Smallest share of a lease that is left when a worker is killed, because it renews before that.
LEASE_LEFT = 0.7

#: Modes whose victims send nothing more, so that their messages return only when their lease ends.
SILENT = (KILL, "pause", "black-hole")

#: Number of the slowest recoveries in a report.
SLOW_SHOWN = 3


@dataclass
class Run:
    message: str
    number: int
    tenant: str
    worker: str
    pid: int
    start: float
    finish: float | None = None


@dataclass
class Verdict:
    """The findings about a run. `lost` and `unattributable` are empty if the broker keeps its promises."""

    confirmed: int = 0
    uncertain: int = 0
    finished: int = 0
    #: Messages that were confirmed, never finished, and are not in the broker.
    lost: list[str] = field(default_factory=list)
    #: The same, but confirmed only by a master that was lost at once, which no broker on Redis can prevent.
    lost_with_master: list[str] = field(default_factory=list)
    #: The known facts about each lost message.
    tales: dict[str, str] = field(default_factory=dict)
    #: Messages that were confirmed and not finished at the end of the run, but are in the broker.
    stuck: list[str] = field(default_factory=list)
    #: Messages that ran more than once.
    duplicated: int = 0
    #: Second runs whose first worker was killed, paused or cut off during the run or before its ack was due.
    attributable: int = 0
    #: All other second runs, as text.
    unattributable: list[str] = field(default_factory=list)
    #: Second runs that began before the end of the first one.
    overlapping: int = 0
    #: Number of younger messages of the same tenant that had started before, for each first start.
    overtaken_p99: float = 0
    overtaken_max: int = 0
    #: Messages that a younger one has overtaken although their tenant runs one at a time, as text.
    disordered: list[str] = field(default_factory=list)
    #: Seconds from a fault to the second run of an interrupted message, by mode: (count, min, median, max).
    recovery: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)
    #: The slowest of them, from the last fault that may have hit a worker with the message in between.
    slowest_recovery: float = 0
    #: Seconds of recoveries that no other fault may have delayed: (count, min, median, max).
    undisturbed: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    #: The slowest recoveries, as text.
    slow: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    seconds: float = 0

    @property
    def good(self) -> bool:
        return not (self.lost or self.stuck or self.unattributable or self.disordered)

    def report(self) -> str:
        faults = ", ".join(f"{count} {mode}" for mode, count in sorted(self.faults.items()))
        lines = [
            f"published {self.confirmed} confirmed, {self.uncertain} uncertain",
            f"finished {self.finished} in {self.seconds:.1f} s",
            f"lost {len(self.lost)}, stuck {len(self.stuck)}",
            *self._lost_with_master(),
            f"ran again: {self.duplicated} messages, {self.overlapping} while the first run was going on",
            f"second runs: {self.attributable} attributable, {len(self.unattributable)} not",
            f"overtaken by younger ones of the tenant: p99 {self.overtaken_p99:g}, max {self.overtaken_max}",
            f"tenants that run one message at a time: {len(self.disordered)} out of order",
            f"faults: {faults or 'none'}",
        ]
        for mode, (count, low, middle, high) in sorted(self.recovery.items()):
            lines.append(
                f"recovery after {mode}: {count} interrupted runs, {low:.2f} / {middle:.2f} / {high:.2f} s "
                "(min / median / max)"
            )
        if self.recovery:
            lines.append(
                f"slowest recovery, counted from the last fault that may have hit a holder: "
                f"{self.slowest_recovery:.2f} s"
            )
        if self.undisturbed[0]:
            count, low, middle, high = self.undisturbed
            lines.append(
                f"recovery of the {count} that no later fault may have hit: "
                f"{low:.2f} / {middle:.2f} / {high:.2f} s (min / median / max)"
            )
        lines += [f"  slow: {line}" for line in self.slow]
        lines += [f"  lost: {message}, {self.tales[message]}" for message in self.lost[:10]]
        lines += [f"  stuck: {message}" for message in self.stuck[:3]]
        lines += [f"  not attributable: {line}" for line in self.unattributable[:10]]
        lines += [f"  out of order: {line}" for line in self.disordered[:10]]
        return "\n".join(lines)

    def _lost_with_master(self) -> list[str]:
        if not self.lost_with_master:
            return []
        count, seconds = len(self.lost_with_master), REPLICATION_ALLOWANCE
        reported = (
            f"lost with a master: {count} that only it had confirmed, less than {seconds:g} s before its end"
        )
        return [f"{reported} (dq_confirm_replicas = 1 prevents that)"]


def runs_of(entries: Sequence[Entry]) -> dict[str, list[Run]]:
    """Return the runs of each message in the order of their starts."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for entry in entries:
        if entry.event == "start":
            runs[entry.message].append(
                Run(entry.message, entry.number, entry.tenant, entry.worker, entry.pid, entry.monotonic)
            )
            continue
        for run in reversed(runs[entry.message]):
            if (run.worker, run.pid) == (entry.worker, entry.pid) and run.finish is None:
                run.finish = entry.monotonic
                break
    for of_one in runs.values():
        of_one.sort(key=lambda run: run.start)
    return dict(runs)


def excuse(first: Run, second: Run, faults: Sequence[Fault]) -> Fault | None:
    """Return the fault that justifies the run `second`; the likeliest of several, None without one.

    A fault that hit the first run itself is likelier than one that hit the reconnect before it. Of these the
    latest is returned.
    """
    found: list[tuple[bool, float, Fault]] = []
    until = second.start if first.finish is None else min(second.start, first.finish + ACK_ALLOWANCE)
    for fault in faults:
        if fault.mode == "pause" and fault.worker == second.worker and _woke_to(second, fault):
            found.append((False, fault.begin, fault))
        if fault.mode.split(" ")[0] not in EXCUSES:
            continue
        if fault.mode not in HITS_ALL and fault.worker != first.worker:
            continue
        if fault.pid and fault.pid != first.pid:
            continue
        cut_off = fault.mode in HITS_ALL or fault.mode == "black-hole"
        orphaned = fault.mode == "kill-worker"
        end = fault.end + (RECONNECT_ALLOWANCE if cut_off else ORPHAN_ALLOWANCE if orphaned else 0)
        if fault.begin <= until and end >= first.start:
            found.append((fault.end >= first.start, fault.begin, fault))
    return max(found, key=lambda row: row[:2])[2] if found else None


def _woke_to(run: Run, pause: Fault) -> bool:
    """Return whether a paused child had the message in its pipe during the lease, and ran it afterwards."""
    return pause.begin < run.start and pause.end >= run.start - ORPHAN_ALLOWANCE


def hit_again(
    first: Run, fault: Fault, begin: float, second: Run, faults: Sequence[Fault], lease_s: float
) -> list[Fault]:
    """Return the faults that may have hit a worker that had the message between `first` and `second`."""
    since = begin + LEASE_LEFT * lease_s if fault.mode in SILENT else begin
    return [
        other
        for other in faults
        if other.mode.split(" ")[0] in EXCUSES
        and since < other.begin < second.start
        and other.worker != first.worker
    ]


def went_with_master(message: str, published: Published, faults: Sequence[Fault]) -> bool:
    """Return whether only the master may have had a message when the master was lost."""
    at = published.confirmed_at.get(message)
    if published.replicated or at is None:
        return False
    return any(
        fault.begin - REPLICATION_ALLOWANCE <= at <= fault.end for fault in faults if fault.mode == "failover"
    )


def judge(
    published: Published,
    entries: Sequence[Entry],
    faults: Sequence[Fault],
    left_in_broker: Collection[str],
    lease_s: float = 0.0,
    in_order: Collection[str] = (),
) -> Verdict:
    """Compute the verdict. Without a lease, a message may be with another worker at any time.

    Args:
        published: The outcomes of the publishes.
        entries: The ledger.
        faults: The faults.
        left_in_broker: The task ids in the broker at the end.
        lease_s: Length of the lease in seconds.
        in_order: Tenants of which one message runs at a time.
    """
    runs = runs_of(entries)
    verdict = Verdict(confirmed=len(published.confirmed), uncertain=len(published.uncertain))
    verdict.faults = dict(Counter(fault.mode for fault in faults))
    done = {message for message, of_one in runs.items() if any(run.finish is not None for run in of_one)}
    verdict.finished = len(done)
    for message in published.confirmed:
        if message in done:
            continue
        if message in left_in_broker:
            verdict.stuck.append(message)
        elif went_with_master(message, published, faults):
            verdict.lost_with_master.append(message)
        else:
            verdict.lost.append(message)
            verdict.tales[message] = _describe_lost(message, published, runs.get(message, ()), faults)
    recovery: dict[str, list[float]] = defaultdict(list)
    undisturbed: list[float] = []
    slow: list[tuple[float, str]] = []
    for message, of_one in runs.items():
        if len(of_one) < 2:
            continue
        verdict.duplicated += 1
        for first, second in pairwise(of_one):
            if first.finish is not None and second.start < first.finish:
                verdict.overlapping += 1
            fault = excuse(first, second, faults)
            if fault is None:
                verdict.unattributable.append(_describe(message, first, second))
                continue
            verdict.attributable += 1
            if first.finish is None or first.finish > fault.begin:
                begin = max(fault.begin, first.start)
                recovery[fault.mode].append(second.start - begin)
                again = hit_again(first, fault, begin, second, faults, lease_s)
                if not again:
                    undisturbed.append(second.start - begin)
                since = max([begin, *(other.begin for other in again)])
                verdict.slowest_recovery = max(verdict.slowest_recovery, second.start - since)
                slow.append((second.start - begin, _describe_slow(fault, begin, second, again, message)))
    verdict.recovery = {mode: _summary(times) for mode, times in recovery.items()}
    if undisturbed:
        verdict.undisturbed = _summary(undisturbed)
    verdict.slow = [line for _, line in sorted(slow, reverse=True)[:SLOW_SHOWN]]
    overtaken = sorted(count_overtaken(runs))
    if overtaken:
        verdict.overtaken_p99 = overtaken[int(len(overtaken) * 0.99)]
        verdict.overtaken_max = overtaken[-1]
    verdict.disordered = find_disordered(runs, in_order)
    if entries:
        moments = [entry.monotonic for entry in entries]
        verdict.seconds = max(moments) - min(moments)
    return verdict


def _summary(times: Sequence[float]) -> tuple[int, float, float, float]:
    return len(times), min(times), median(times), max(times)


def count_overtaken(runs: Mapping[str, Sequence[Run]]) -> list[int]:
    """Return, for each message, how many younger messages of its tenant had started before it."""
    by_tenant: dict[str, list[Run]] = defaultdict(list)
    for of_one in runs.values():
        by_tenant[of_one[0].tenant].append(of_one[0])
    counts = []
    for firsts in by_tenant.values():
        # Count from the last start backwards, in a binary indexed tree of the numbers seen so far.
        ranks = {number: rank for rank, number in enumerate(sorted(run.number for run in firsts), 1)}
        tree = [0] * (len(firsts) + 1)
        for seen, run in enumerate(sorted(firsts, key=lambda run: run.start)):
            rank = ranks[run.number]
            older, index = 0, rank
            while index:
                older += tree[index]
                index &= index - 1
            counts.append(seen - older)
            index = rank
            while index < len(tree):
                tree[index] += 1
                index += index & -index
    return counts


def find_disordered(runs: Mapping[str, Sequence[Run]], tenants: Collection[str]) -> list[str]:
    """Return the messages of these tenants that started after a younger one of their tenant."""
    firsts = sorted((of_one[0] for of_one in runs.values()), key=lambda run: run.start)
    latest: dict[str, Run] = {}
    found = []
    for run in firsts:
        if run.tenant not in tenants:
            continue
        before = latest.setdefault(run.tenant, run)
        if run.number < before.number:
            found.append(
                f"{run.message}, number {run.number} of {run.tenant}, started on {run.worker} "
                f"{run.start - before.start:.3f} s after number {before.number} on {before.worker}"
            )
        else:
            latest[run.tenant] = run
    return found


def _describe_lost(message: str, published: Published, runs: Sequence[Run], faults: Sequence[Fault]) -> str:
    confirmed = published.confirmed_at.get(message)
    reported = [f"confirmed at {confirmed:.3f}"] if confirmed is not None else []
    reported += [f"started on {run.worker} at {run.start:.3f} and never ended" for run in runs]
    last = max((run.start for run in runs), default=confirmed or 0)
    near = [fault for fault in faults if abs(fault.begin - last) < 5]
    reported += [
        f"{fault.mode} {fault.worker or '(all)'} {fault.begin:.3f} to {fault.end:.3f}" for fault in near
    ]
    return "; ".join(reported if runs else [*reported, "never started"])


def _describe_slow(fault: Fault, begin: float, second: Run, again: Sequence[Fault], message: str) -> str:
    reported = [
        f"{message} ran again {second.start - begin:.2f} s after {fault.mode} {fault.worker or '(all)'}"
    ]
    reported += [f"{other.mode} {other.worker or '(all)'} at {other.begin - begin:.2f} s" for other in again]
    return "; ".join(reported)


def _describe(message: str, first: Run, second: Run) -> str:
    ended = "never ended" if first.finish is None else f"ended {second.start - first.finish:+.3f} s before"
    later = second.start - first.start
    return f"{message} ran on {first.worker} ({ended}), then {later:.3f} s later on {second.worker}"
