"""The cost of a no-op task in a worker and in Redis: CPU time and calls, which a busy machine changes little.

``python -m benchmarks.worker_cost --beside PATH`` measures another checkout of this project in turns with
this one. Both run the tasks of their own ``benchmarks/shop.py``, with the settings that are given here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.measure import Report, Series, dump, interleave, ratio

#: Celery's default prefetch multiplier.
PREFETCH = 4
#: Pool -> concurrency.
POOLS = {"solo": 1, "threads": 2, "prefork": 2}
HERE = Path(__file__).resolve().parent.parent
#: Quantity of a round -> heading of its column.
COLUMNS = {
    "rate": "tasks/s",
    "worker": "worker µs",
    "children": "children µs",
    "redis": "redis µs",
    "scripts": "scripts",
    "commands": "commands",
    "reads": "reads",
    "bytes": "bytes",
}


def worker_cost(quick: bool) -> Report:
    """Measure CPU time, script calls, commands, reads and bytes per no-op task of a backlog."""
    contenders = {name: (HERE, name) for name in ("stock", "dq")}
    amount, rounds = (2_000, 1) if quick else (10_000, 3)
    return _compare(contenders, "stock", ["prefork"], rounds, amount, PREFETCH)


def _compare(
    contenders: dict[str, tuple[Path, str]],
    base: str,
    pools: list[str],
    rounds: int,
    amount: int,
    prefetch: int,
) -> Report:
    report = Report("worker_cost")
    report.header = ["pool", "acks", "broker", *COLUMNS.values(), f"worker vs {base}", f"redis vs {base}"]
    report.notes.append(f"{amount} no-op tasks with one argument, published first; no events")
    report.notes.append(f"prefetch multiplier {prefetch}")
    report.notes.append(
        "per task, from the first to the last; µs of CPU: main process of the worker, its pool, Redis"
    )
    report.notes.append("scripts, commands, reads of a socket and bytes: counters of Redis")
    for pool in pools:
        for acks in ("early", "late"):

            def measure(name: str, pool: str = pool, acks: str = acks) -> dict[str, float]:
                tree, broker = contenders[name]
                return _in_tree(tree, [broker, pool, acks, str(amount), str(prefetch)])

            found = interleave(list(contenders), rounds, measure, 600)
            for name in contenders:
                row = found[name]
                against = [ratio(row[key], found[base].get(key, Series())) for key in ("worker", "redis")]
                report.row(pool, acks, name, *(row[key] for key in COLUMNS), *against)
            report.data[f"{pool} {acks}"] = dump(found)
    return report


def _in_tree(tree: Path, arguments: list[str]) -> dict[str, float]:
    """Measure one round with the package, the tasks and the worker of a checkout."""
    ran = subprocess.run(
        [sys.executable, __file__, "--round", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"the round {arguments} in {tree} failed:\n{ran.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def _round(broker: str, pool: str, acks: str, amount: int, prefetch: int) -> dict[str, float]:
    # These modules are those of the checkout in which the round runs.
    from benchmarks.shop import NAME, add_tasks
    from celery_dq.testing.servers import RedisServer
    from tests.brokers import BROKERS
    from tests.workers import WorkerProcess, make_app

    with RedisServer() as server, RedisServer() as clock:
        conf: dict[str, Any] = {
            "broker_url": BROKERS[broker].url(server.port),
            "clock_port": clock.port,
            "task_acks_late": acks == "late",
            "worker_prefetch_multiplier": prefetch,
        }
        app = add_tasks(make_app(NAME, BROKERS[broker], conf), clock.port)
        with app.producer_pool.acquire(block=True) as producer:
            app.tasks["mark"].apply_async(("begin",), producer=producer)
            for number in range(amount):
                app.tasks["noop"].apply_async((number,), producer=producer)
            app.tasks["mark"].apply_async(("end",), producer=producer)
        worker = WorkerProcess(
            "benchmarks.shop",
            broker=BROKERS[broker],
            conf=conf,
            pool=pool,
            concurrency=POOLS[pool],
            loglevel="WARNING",
        )
        with (
            redis.Redis(port=server.port) as probe,
            redis.Redis(port=clock.port, socket_timeout=None) as client,
            worker,
        ):
            begin: Any = client.blpop(["begin"], timeout=60)
            before = _counts(worker.pid, probe)
            end: Any = client.blpop(["end"], timeout=200)
            after = _counts(worker.pid, probe)
        app.close()
    if begin is None or end is None:
        raise TimeoutError(f"{broker} did not run {amount} tasks in {pool}")
    spent = {key: (after[key] - before[key]) / amount for key in after}
    return {"rate": amount / (float(end[1]) - float(begin[1])), **spent}


def _counts(pid: int, probe: Any) -> dict[str, float]:
    """Return the counters of the worker and of Redis; times in µs."""
    info = probe.info("everything")
    calls = {name: row["calls"] for name, row in info.items() if name.startswith("cmdstat_")}
    worker = psutil.Process(pid)
    return {
        "worker": _cpu_us(worker),
        "children": sum(_cpu_us(child) for child in worker.children()),
        "redis": (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6,
        "scripts": sum(calls.get(f"cmdstat_{name}", 0) for name in ("evalsha", "eval", "fcall")),
        "commands": sum(calls.values()),
        "reads": info["total_reads_processed"],
        "bytes": info["total_net_input_bytes"] + info["total_net_output_bytes"],
    }


def _cpu_us(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_cost", description=__doc__)
    parser.add_argument("--beside", type=Path, metavar="PATH", help="another checkout; default: stock")
    parser.add_argument("--pool", choices=list(POOLS), default="prefork")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amount", type=int, default=10_000, help="tasks of one round")
    parser.add_argument("--prefetch", type=int, default=PREFETCH, help="prefetch multiplier")
    options = parser.parse_args()
    if options.beside is None:
        contenders = {name: (HERE, name) for name in ("stock", "dq")}
    else:
        contenders = {"other checkout": (options.beside.resolve(), "dq"), "this checkout": (HERE, "dq")}
    base = next(iter(contenders))
    numbers = (options.rounds, options.amount, options.prefetch)
    print(_compare(contenders, base, [options.pool], *numbers).text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--round"]:
        broker, pool, acks, amount, prefetch = sys.argv[2:]
        print(json.dumps(_round(broker, pool, acks, int(amount), int(prefetch))))
    else:
        main()
