"""The short run of :mod:`tests.outbox.kills`; the long one is a program."""

from __future__ import annotations

from pathlib import Path

from celery_dq.testing.servers import RedisServer
from tests.databases import PostgreSQLServer
from tests.outbox.kills import KillRun, OutboxVerdict, judge_outbox
from tests.outbox.outbox_shop import OutboxShop
from tests.outbox.shop.caller import MOST


def test_each_committed_call_is_in_the_broker_once_however_processes_die(
    tmp_path: Path, postgresql: PostgreSQLServer
) -> None:
    postgresql.make_database("kills")
    with RedisServer(appendonly=True) as broker:
        settings = {"default": postgresql.settings("kills")}
        shop = OutboxShop.made(settings, broker.url(scheme="dq-redis"), tmp_path)
        try:
            verdict = KillRun(shop, broker, seed=11).run(kills=12, seconds=30)
        finally:
            shop.close()
    assert verdict.clean, str(verdict)
    assert verdict.kills.total() >= 6, str(verdict)
    assert verdict.orders > 20, str(verdict)


def test_the_verdict_on_an_outbox_names_each_fault() -> None:
    first, second = MOST, 2 * MOST
    orders = [first, first + 1, second]
    good = judge_outbox(OutboxVerdict(), orders, [first, second, first + 1])
    assert good.clean
    assert good.orders == 3
    assert judge_outbox(OutboxVerdict(), orders, [first, second]).lost == [first + 1]
    assert judge_outbox(OutboxVerdict(), orders, [*orders, second]).twice == [second]
    assert judge_outbox(OutboxVerdict(), orders, [*orders, -first]).rolled_back == [-first]
    assert judge_outbox(OutboxVerdict(), orders, [first + 1, first, second]).disordered == [first]
