"""An installed wheel or sdist works on each kind of broker, and an incomplete one names the missing file."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_dq.testing.waiting import wait_until
from tests.packaging.environment import Installed, Shop


@pytest.fixture(params=["dq-redis", "redis", "dq-zookeeper"])
def shop(
    request: pytest.FixtureRequest, tmp_path: Path, installed: Installed, redis_url: str, hosts: str
) -> Shop:
    """Return the app on a broker. Dedup locks are in Redis: the broker, or else the result backend."""
    broker = f"dq-zookeeper://{hosts}" if request.param == "dq-zookeeper" else redis_url
    conf = {"broker_url": broker.replace("redis://", f"{request.param}://"), "result_backend": redis_url}
    if request.param == "redis":
        conf["dq_election"] = redis_url
    elif request.param == "dq-zookeeper":
        conf["dq_election"] = f"zookeeper://{hosts}"
    return Shop(tmp_path, installed, conf)


def test_a_task_of_each_kind_runs(shop: Shop, installed: Installed) -> None:
    with shop.worker():
        where, *results = shop.call()
    assert where == str(installed.package / "__init__.py")
    assert results[:3] == ["notified bakery", "notified buffered bakery", "refreshed bread"]
    assert results[3].startswith("posted with token ")
    assert "Traceback" not in shop.log


def test_the_command_is_installed(tmp_path: Path, installed: Installed, redis_url: str) -> None:
    shop = Shop(tmp_path, installed, {"broker_url": redis_url.replace("redis://", "dq-redis://")})
    (line,) = [line for line in shop.doctor() if not line.startswith("OK")]
    assert line.startswith("WARNING The server keeps no append-only file")
    assert shop.scheduler("dq") == ["<class 'celery_dq.beat.scheduler.ElectedScheduler'>"]


@pytest.mark.parametrize(
    ("scheme", "missing"),
    [
        ("dq-redis", "transport/redis/lua/include/lease.lua"),
        ("dq-redis", "leadership/stand.lua"),
        ("redis", "other_brokers/lua/start.lua"),
    ],
)
def test_a_worker_of_an_incomplete_installation_ends_at_its_start(
    tmp_path: Path, installed: Installed, redis_url: str, scheme: str, missing: str
) -> None:
    conf = {"broker_url": redis_url.replace("redis://", f"{scheme}://"), "dq_election": redis_url}
    shop = Shop(tmp_path, installed, conf)
    file = installed.package / missing
    source = file.read_text()
    file.unlink()
    try:
        with shop.worker() as worker:
            wait_until(lambda: worker.poll() is not None, 60, what=lambda: shop.log)
            assert worker.returncode == 1
    finally:
        file.write_text(source)
    last = shop.log.splitlines()[-1]
    assert f"the script '{file.stem}' of celery-dq is missing" in last
    assert last.endswith("the installation is incomplete, install celery-dq again")
