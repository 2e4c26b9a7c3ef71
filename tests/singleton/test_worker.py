"""Workers that volunteer for a led queue."""

from __future__ import annotations

import pytest

from tests.singleton.office import Bank


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(bank: Bank, pool: str) -> None:
    posted = bank.post(range(30))
    with bank.worker(pool=pool, concurrency=4):
        assert bank.finished(30) == posted
    assert bank.overlaps() == 0
    assert {entry.token for entry in bank.book.entries()} == {1}
