"""A cache-refresh storm: prices change a hundred times as fast as the cache can be refreshed.

Each change of a product calls a refresh of its cache entry, which takes a fifth of a second. The numbers of
the products have a Gaussian distribution, so a few products change often. The same changes are replayed twice
on celery-dq: without dedup, and with ``@dedup(key="{sku}")``. The program prints how many refreshes ran, and
how stale the cache was: the time from a change to the start of the first refresh that saw it.

Run it as ``python example_project/storm.py``; it needs no running server. This file is the program, and also
the Celery app of its worker (``celery -A storm worker``).
"""

from __future__ import annotations

import argparse
import bisect
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from celery import Celery

import celery_dq
from celery_dq import dedup
from celery_dq.dedup.repetition import repetition
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until

HOME = Path(__file__).resolve().parent
PRODUCTS = 20
CHANGES_PER_SECOND = 500
REFRESH_S = 0.2
THREADS = 8

LEDGER = "STORM_LEDGER"


def make_app(broker: str) -> Celery:
    """The app, with its one task."""
    app = Celery("storm", broker=broker, set_as_current=False)
    app.conf.update(
        task_ignore_result=True, task_default_queue="cache", broker_connection_retry_on_startup=True
    )
    celery_dq.setup(app)

    @app.task(name="refresh", shared=False)
    @dedup(key="{sku}")
    def refresh(sku: int) -> None:
        """Read the product and write its cache entry."""
        # No timeout, because a run that is recorded again would count twice.
        with redis.Redis.from_url(os.environ[LEDGER], socket_timeout=None) as ledger:
            ledger.rpush(f"refreshed:{sku}", time.time())
        time.sleep(REFRESH_S)

    return app


app = make_app(os.environ.get("STORM_BROKER", ""))


def changes(amount: int, seed: int) -> list[int]:
    """Return the products that change, in order."""
    chance = random.Random(seed)
    return [min(int(abs(chance.gauss(0, PRODUCTS / 4))), PRODUCTS - 1) for _ in range(amount)]


def play(skus: Sequence[int], log: Path, *, with_dedup: bool) -> dict[str, float]:
    """Replay the storm with its own worker, which writes to `log`; return the outcome."""
    with RedisServer(has_password=True) as server, log.open("ab") as output:
        broker, book = server.url(0, scheme="dq-redis"), server.url(1)
        environment = {**os.environ, "STORM_BROKER": broker, LEDGER: book}
        package_root = Path(celery_dq.__file__ or "").resolve().parents[1]
        environment["PYTHONPATH"] = os.pathsep.join([str(HOME), str(package_root)])
        command = [sys.executable, "-m", "celery", "-A", "storm", "worker", "-P", "threads"]
        command += ["-c", str(THREADS), "-l", "WARNING"]
        worker = subprocess.Popen(command, cwd=HOME, env=environment, stdout=output, stderr=output)
        try:
            with make_app(broker) as caller, redis.Redis.from_url(book) as ledger:
                wait_until(lambda: _ready(caller, worker), 60, what="the worker")
                return _play(caller, skus, with_dedup, ledger)
        finally:
            worker.terminate()
            worker.wait(30)


def _ready(caller: Celery, worker: subprocess.Popen[bytes]) -> bool:
    if worker.poll() is not None:
        raise ChildProcessError(f"the worker ended with {worker.returncode}")
    return bool(caller.control.ping(timeout=0.5))


def _play(caller: Any, skus: Sequence[int], with_dedup: bool, ledger: Any) -> dict[str, float]:
    refresh = caller.tasks["refresh"]
    made: list[float] = []
    began = time.time()
    for number, sku in enumerate(skus):
        ahead = began + number / CHANGES_PER_SECOND - time.time()
        if ahead > 0:
            time.sleep(ahead)
        made.append(time.time())
        refresh.apply_async((sku,), dedup=None if with_dedup else False)
    last = dict(zip(skus, made, strict=True))

    def fresh() -> bool:
        """Return whether each product was refreshed after its last change, and no message waits."""
        depth = caller.dq.queues["cache"].snapshot().waiting
        latest = {sku: float(ledger.lindex(f"refreshed:{sku}", -1) or b"0") for sku in last}
        return depth == 0 and all(latest[sku] >= at for sku, at in last.items())

    wait_until(fresh, 300, interval_s=0.1, what="a refresh after every product's last change")
    starts = {sku: [float(each) for each in ledger.lrange(f"refreshed:{sku}", 0, -1)] for sku in last}
    runs = sum(map(len, starts.values()))
    stale = sorted(
        starts[sku][bisect.bisect_left(starts[sku], at)] - at for sku, at in zip(skus, made, strict=True)
    )
    return {
        "changes": len(skus),
        "refreshes": runs,
        "work saved": 1 - runs / len(skus),
        "stale p50 s": stale[len(stale) // 2],
        "stale p99 s": stale[len(stale) * 99 // 100],
        "fresh after s": max(each[-1] for each in starts.values()) - began,
    }


def main(argv: list[str] | None = None) -> int:
    """Replay the storm twice, and print both outcomes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--changes", type=int, default=1_500, help="how many prices change (1500)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another storm (1)")
    parser.add_argument("--out", type=Path, default=HOME / "out", help="directory for the picture")
    chosen = parser.parse_args(argv)
    skus = changes(chosen.changes, chosen.seed)
    report = repetition(map(str, skus), THREADS)
    print(f"{chosen.changes} changes of {report.keys} products, {CHANGES_PER_SECOND}/s; {THREADS} threads")
    print(f"repetition: {report.kind.value}. {report.advice}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:
        report.plot(chosen.out / "repetition.png")
        print(f"the repetition, drawn: {chosen.out / 'repetition.png'}")
    except ImportError:
        print("(pip install matplotlib draws the repetition)")
    found = {}
    for name, with_dedup in (("without dedup", False), ("with dedup", True)):
        found[name] = play(skus, chosen.out / "storm.log", with_dedup=with_dedup)
        if len(found) == 1:
            print(f"{'':<14}" + "".join(f"{column:>15}" for column in found[name]))
        print(f"{name:<14}" + "".join(f"{value:>15,.2f}" for value in found[name].values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
