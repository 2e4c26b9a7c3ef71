"""3,000 quotas on one machine: whether each queue or tenant gets its rate, and the highest total that holds.

This is the machine of EMQ: 3,000 queues with a quota each, and 1,000 messages/s in all. Each of them has a
backlog, so that only its quota holds it back. The stock transport has no quotas, so the results are compared
with the promise only.

A window of a minute holds 20 messages of a queue with 1/3 message/s, and a count of 20 cannot tell 1 %. So
the error of a rate is taken from the time between the first and the last message in the window: 19 intervals,
which should last 57 s. An error of 1 % is 0.57 s there. This does not see a quota that stops within the
window. So the counts are compared, too: a window of T seconds has to hold rate x T messages within 1 % or one
message, whichever is more, as ``quotas`` states it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from kombu import Connection, Consumer, Message, Queue

from benchmarks.measure import Report, ServerProbe, benchmark, chosen, print_progress, short, spending
from benchmarks.postbox import batch_of
from benchmarks.quotas import worst_excess
from benchmarks.shop import RECORD
from benchmarks.workers import app_of, settings, worker_of
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import ROOT

QUOTAS, QUICK_QUOTAS = 3_000, 300
CASES = (
    ("tenants", "kombu"),
    ("tenants", "threads"),
    ("queues", "kombu"),
    ("queues", "solo"),
    ("queues", "threads"),
)
#: Messages/s in all -> seconds of its window: EMQ's machine, and ten times it. A queue gets 20 messages in
#: the first, and 100 in the second.
TOTALS = {1_000.0: 60.0, 10_000.0: 30.0}
#: The cases whose highest total is looked for: all quotas in one queue, and a queue for each.
SEARCHED = (("tenants", "kombu"), ("queues", "kombu"), ("queues", "solo"))
#: Messages/s in all between which it is looked for, at first.
LEAST, MOST = 500.0, 32_000.0
#: Runs that look for it. Four leave a factor of 1.3 between a total that holds and one that does not.
PROBES = 4
CONSUMERS = 2
#: Most that a rate may differ from its quota.
TOLERANCE = 0.01
#: Seconds of the windows: of a quick look, and of the search. There it holds 10 messages of a queue or more.
QUICK_WINDOW_S, PROBE_WINDOW_S, PROBE_MESSAGES = 8.0, 15.0, 10
#: The backlog lasts for so many seconds beside window and warm-up, or as long as so many messages in all
#: last, whichever is more. All consumers have begun by then.
SLACK_S, SLACK_MESSAGES = 20.0, 60_000
QUEUE = "push"


class Form(NamedTuple):
    """One way to have many quotas."""

    name: str
    quotas: int

    @property
    def queues(self) -> list[str]:
        return [self.home(number)[0] for number in range(self.quotas if self.name == "queues" else 1)]

    def home(self, number: int) -> tuple[str, str]:
        """Return queue and tenant of the quota with this number."""
        return (f"q{number}", "") if self.name == "queues" else (QUEUE, f"t{number}")


class BacklogEndedError(Exception):
    """A quota had no backlog in a part of the window, so that its rate says nothing."""


class Accuracy(NamedTuple):
    """The served messages of one window beside the quotas."""

    #: Messages/s in all.
    served: float
    #: Quotas whose rate differs by more than 1 %, or whose count does by more than max(1 %, one message).
    beyond: int
    #: The worst error of a rate: 0.01 is 1 %.
    worst: float
    #: The worst difference of a count from rate x window, in messages.
    off: float
    #: The most messages of any window beyond rate x window + burst; below 0 for none.
    excess: float


@benchmark(
    "quotas of | consumers | asked/s | window s | served/s | beyond 1 % | worst % | worst count"
    " | worst window | redis CPU % | consumers CPU % | CPU wait % | redis MB | consumers MB",
    f"""
    {{quotas:,}} equal quotas; asked: their sum; each has a backlog, published before
    tenants: of one queue; queues: each has a quota for its messages without a tenant
    {CONSUMERS} consumers; kombu: they ack at once, prefetch 100
    threads, solo: workers of this pool, with 2 slots or one
    beyond 1 %: quotas whose rate, from the first to the last message in the window, differs by more
    these include quotas whose count in the window differs by more than 1 % and one message
    worst %: of these rates
    worst count: messages in the window beside rate x window; 1 is the edge of a window
    worst window: messages of any window beyond rate x window + burst, by the consumers' clocks
    CPU: of one core, in the window; memory: at its end, with the rest of the backlog
    CPU wait: time that threads of the consumers waited for a core, in % of the window
    highest: from the highest total with all within 1 % to the lowest without, by a coarse search
    the other figures of that row are those of the former
    """,
)
def many_quotas(report: Report, quick: bool, only: str = "") -> None:
    """Measure the accuracy of 3,000 quotas at fixed totals, and the highest total with all within 1 %."""
    quotas = QUICK_QUOTAS if quick else QUOTAS
    report.fill_in(quotas=quotas)
    totals = {float(quotas): QUICK_WINDOW_S} if quick else TOTALS
    highest = "the highest total"
    parts = [(*case, f"{total:,.0f}/s") for case in CASES for total in totals]
    parts += [] if quick else [(*case, highest) for case in SEARCHED]
    cases = chosen([", ".join(part) for part in parts], only)
    for name, kind in CASES:
        form = Form(name, quotas)
        held, failed = 0.0, MOST
        best = ["-"] * (len(report.header) - 3)
        for total, window_s in totals.items():
            wanted = total < failed and f"{name}, {kind}, {total:,.0f}/s" in cases
            if wanted and (run := _run(report, form, kind, total, window_s)):
                is_held, cells = run
                report.row(name, kind, f"{total:,.0f}", *cells)
                held, failed, best = (total, failed, cells) if is_held else (held, total, best)
        if f"{name}, {kind}, {highest}" not in cases:
            continue
        for _ in range(PROBES):
            total = math.sqrt(max(held, LEAST) * failed)
            window_s = max(PROBE_WINDOW_S, PROBE_MESSAGES * quotas / total)
            if (run := _run(report, form, kind, total, window_s)) is None:
                break
            is_held, cells = run
            held, failed, best = (total, failed, cells) if is_held else (held, total, best)
        report.row(name, kind, "highest", best[0], f"{held:,.0f} to {failed:,.0f}", *best[2:])
        report.data[f"{name}, {kind}"] = {"held": held, "failed": failed}


def _run(
    report: Report, form: Form, kind: str, total: float, window_s: float
) -> tuple[bool, list[str]] | None:
    """Measure one total; None if the machine was too slow for a figure.

    Returns:
        Whether all quotas were within 1 %, and the cells of the row, from the window on.
    """
    case = f"{form.name}, {kind}, {total:,.0f}/s"
    try:
        found, costs = measure(form, kind, total, window_s)
    except (BacklogEndedError, TimeoutError) as error:
        print(f"   {case}: {error}", flush=True)
        return None
    print_progress(case, found._asdict())
    report.data[case] = {**found._asdict(), "costs": costs}
    cells = [f"{window_s:.0f}", f"{found.served:,.0f}", str(found.beyond), f"{100 * found.worst:.3g}"]
    return found.beyond == 0, [*cells, f"{found.off:.3g}", f"{found.excess:.3g}", *map(short, costs)]


def measure(form: Form, kind: str, total: float, window_s: float) -> tuple[Accuracy, list[float]]:
    """Serve a backlog of each quota for one window.

    Returns:
        The accuracy, and the costs: CPU of Redis and of the consumers in % of a core, the wait of the
        consumers for a core in % of the window, megabytes of both.

    Raises:
        BacklogEndedError: A quota had no backlog in a part of the window.
    """
    rate, broker = total / form.quotas, BROKERS["dq"]
    burst = max(2, math.ceil(rate * 0.1))
    warm_up_s = max(5.0, 3 / rate)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quotas-")))
        server = stack.enter_context(RedisServer())
        record = folder / "record"
        record.touch()
        options = {"socket_timeout": 60.0}
        conf = settings(broker.url(server.port), record=str(record), broker_transport_options=options)
        app = stack.enter_context(app_of("dq", conf))
        for number in range(form.quotas):
            app.dq.quotas.set(*form.home(number), rate=rate, burst=burst)
        slack_s = max(SLACK_S, SLACK_MESSAGES / total)
        backlog = math.ceil(rate * (window_s + warm_up_s + slack_s)) + burst
        _publish(app, form, backlog)
        pids = stack.enter_context(_consuming(kind, form, conf, folder))
        seen: set[int] = set()

        def all_begun() -> bool:
            seen.update(number for _, number in RECORD.iter_unpack(_whole(record)))
            return len(seen) == form.quotas

        wait_until(all_begun, 60.0)
        time.sleep(warm_up_s)  # the bursts are over
        begin, waited = time.monotonic(), _waited_seconds(pids)
        with spending(server.port, pids=pids) as spent:
            time.sleep(window_s)  # the window
        end, waited = time.monotonic(), _waited_seconds(pids) - waited
        costs = [100 * cpu_s / spent.wall_s for cpu_s in (*spent.redis_s, spent.others_s, waited)]
        with closing(ServerProbe(server.port)) as probe:
            costs += [probe.bytes_used() / 1e6]
        costs += [sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6]
        moments: dict[int, list[float]] = defaultdict(list)
        for at, number in RECORD.iter_unpack(_whole(record)):
            moments[number].append(at)
    rows = [moments[number] for number in range(form.quotas)]
    if ended := sum(len(row) == backlog for row in rows):
        raise BacklogEndedError(
            f"the backlog of {ended:,} quotas ended, because the consumers took too long to begin: "
            "no figure, measure again"
        )
    return accuracy(rows, rate, burst, begin, end), costs


def accuracy(rows: Sequence[list[float]], rate: float, burst: float, begin: float, end: float) -> Accuracy:
    """Compare the moments of each quota's messages with the quota.

    Args:
        rows: The moments of each quota's messages, in seconds.
        rate: Messages/s of each quota.
        burst: Messages that each quota may be ahead.
        begin: The beginning of the window.
        end: Its end.
    """
    errors, counts, expected = [], [], rate * (end - begin)
    for row in rows:
        inside = sorted(at for at in row if begin <= at < end)
        counts.append(len(inside) - expected)
        errors.append(_rate(inside) / rate - 1)
    # A window is some ms longer than asked, so one message less is a difference of 1.001.
    most = max(TOLERANCE * expected, 1.0)
    return Accuracy(
        served=sum(count + expected for count in counts) / (end - begin),
        beyond=sum(
            abs(error) > TOLERANCE or round(abs(count), 2) > most
            for error, count in zip(errors, counts, strict=True)
        ),
        worst=max(errors, key=abs),
        off=max(counts, key=abs),
        excess=max(worst_excess(row, rate, burst) for row in rows),
    )


def _rate(moments: Sequence[float]) -> float:
    """Return the messages/s between the first and the last of these moments; 0 without two of them."""
    return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0


def _publish(app: Any, form: Form, each: int) -> None:
    """Publish so many messages of each quota: those of a queue together, those of tenants by turns."""
    recorded = app.tasks["recorded"]
    numbers = range(form.quotas)
    turns: Iterator[int] = (
        (number for number in numbers for _ in range(each))
        if form.name == "queues"
        else (number for _ in range(each) for number in numbers)
    )
    with app.producer_pool.acquire(block=True) as producer, batch_of(producer):
        for number in turns:
            queue, tenant = form.home(number)
            options = {"tenant": tenant} if tenant else {}
            recorded.apply_async((number,), queue=queue, producer=producer, **options)


@contextmanager
def _consuming(kind: str, form: Form, conf: dict[str, Any], folder: Path) -> Iterator[list[int]]:
    """Run the consumers during the block; yield the ids of their processes."""
    with ExitStack() as stack:
        if kind != "kombu":
            names = [f"w{number}" for number in range(CONSUMERS)]
            workers = [worker_of("dq", conf, pool=kind, name=name, queues=form.queues) for name in names]
            for worker in workers:
                stack.callback(worker.discard)
                worker.start()
            for worker in workers:
                worker.wait_ready(120.0)
            yield [worker.pid for worker in workers]
            return
        arguments = [conf["broker_url"], conf["record"], form.name, str(form.quotas)]
        files, pids = [folder / f"ready-{number}" for number in range(CONSUMERS)], []
        for ready in files:
            program = [sys.executable, "-m", "benchmarks.many_quotas", *arguments, str(ready)]
            process = stack.enter_context(subprocess.Popen(program, cwd=ROOT))
            stack.callback(process.kill)
            pids.append(process.pid)
        for ready in files:
            wait_until(ready.exists, 60.0)
        yield pids


def _waited_seconds(pids: Sequence[int]) -> float:
    """Return how long the threads of these processes have been ready to run while no core was free."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def _whole(record: Path) -> bytes:
    """Return the entries of the file, without one that is being written."""
    content = record.read_bytes()
    return content[: len(content) - len(content) % RECORD.size]


def _consume(url: str, record: str, form: Form, ready: Path) -> None:
    """Acknowledge all messages at once and record their times, until SIGTERM."""
    BROKERS["dq"].prepare()
    file = os.open(record, os.O_WRONLY | os.O_APPEND)

    def on_message(message: Message) -> None:
        now = time.monotonic()
        (number,) = message.decode()[0]
        os.write(file, RECORD.pack(now, number))
        message.ack()

    with Connection(url, transport_options={"socket_timeout": 60.0}) as connection:
        channel: Any = connection.channel()
        queues = [Queue(name) for name in form.queues]
        consumer = Consumer(channel, queues, on_message=on_message, prefetch_count=100, auto_declare=False)
        consumer.consume()
        ready.touch()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        while True:
            with suppress(TimeoutError):
                connection.drain_events(timeout=1.0)


if __name__ == "__main__":
    _consume(sys.argv[1], sys.argv[2], Form(sys.argv[3], int(sys.argv[4])), Path(sys.argv[5]))
