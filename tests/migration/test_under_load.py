"""The paths of the guide *Migrating*, with real workers of both brokers."""

from __future__ import annotations

import pytest

from celery_dq.testing.waiting import wait_until
from tests.migration.under_load import Move
from tests.migration.worker_app import NAME


@pytest.mark.parametrize("back", [False, True])
def test_a_migration_under_load_loses_and_doubles_nothing(back: bool) -> None:
    with Move(messages=400, kills=1, seed=7, back=back) as move:
        figures = move.run()
    assert (figures.lost, figures.doubled, figures.published) == (0, 0, 400)


def test_draining_either_way_needs_no_migration() -> None:
    with Move(messages=40, kills=0, seed=7) as move, move.workers["stock"], move.workers["dq"]:
        # The producers switch to the new broker, and the old workers run dry. Then the producers switch back.
        for name in ("stock", "dq", "dq", "stock"):
            move.publish(name, 10)
        wait_until(lambda: move.ledger.hlen("runs") == 40, 60)
        assert {*move.ledger.hvals("runs")} == {b"1"}
        wait_until(lambda: not move.stock.exists(NAME, "unacked"), 30)
