"""The outbox under faults: each committed call is published once, and no other call is."""

from __future__ import annotations

import json
import signal

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.outbox.conftest import MakeShop
from tests.outbox.outbox_shop import OutboxShop

#: A short election, so that the next relay begins soon after a kill.
QUICK = {"dq_election_session": 1}
CALLS = """
with transaction.atomic():
    for number in range({}, {}): notify.delay("acme", number)
"""


def test_a_call_of_a_process_that_was_killed_after_the_commit_is_published_once(
    postgresql_shop: OutboxShop,
) -> None:
    shop = postgresql_shop
    killed = shop.start(CALLS.format(0, 5) + "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait(30) == -signal.SIGKILL
    killed = shop.start("""
with transaction.atomic():
    notify.delay("acme", 5)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    assert killed.wait(30) == -signal.SIGKILL
    assert shop.rows() == 5
    with shop.worker(queues="other"):
        shop.await_empty()
    assert shop.waiting() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *(("sqlite", moment) for moment in ("before 1", "after 1", "before 2", "after 2")),
        *((kind, "after 1") for kind in ("postgresql", "mariadb")),
    ],
)
def test_a_batch_of_a_relay_that_was_killed_is_stored_once(
    make_shop: MakeShop, kind: str, moment: str
) -> None:
    shop = make_shop(kind)
    small = {**QUICK, "dq_buffer_batch_size": 3}
    shop.run(CALLS.format(0, 8))
    with shop.worker(queues="other", SHOP_KILL=moment, **small) as killed:
        assert killed.wait(30) == -signal.SIGKILL
    assert shop.rows() == (8 if moment.endswith("1") else 5)
    shop.run(CALLS.format(8, 10))
    with shop.worker(queues="other", **small):
        shop.await_empty()
    assert shop.waiting() == [*range(10)]


def test_rows_stay_while_the_broker_is_away(make_shop: MakeShop) -> None:
    shop = make_shop("sqlite")
    with RedisServer() as server:
        shop.environment["SHOP_BROKER"] = server.url(scheme="dq-redis")
        with shop.worker(queues="other", **QUICK):
            shop.run(CALLS.format(0, 1))
            shop.await_empty()
            server.kill()
            shop.run(CALLS.format(1, 4))
            assert shop.rows() == 3
            server.restart()
            shop.await_empty()
        assert shop.waiting() == [1, 2, 3]


@pytest.mark.logged_error("refused message")
def test_a_message_that_the_broker_refuses_stays_as_a_row_with_the_reason(make_shop: MakeShop) -> None:
    shop = make_shop("postgresql")
    with RedisServer(config={"proto-max-bulk-len": "1mb"}) as server:
        shop.environment["SHOP_BROKER"] = server.url(scheme="dq-redis")
        shop.run("""
with transaction.atomic():
    notify.delay("acme", 1)
    notify.apply_async(("acme", 2), headers={"note": 2_000_000 * "+"})
    notify.delay("acme", 3)
""")
        with shop.worker(queues="other", **QUICK):
            wait_until(lambda: shop.run("answer = OutboxRow.objects.exclude(error='').count()"), 60)
            wait_until(lambda: shop.rows() == 1, 30)
        assert shop.waiting() == [1, 3]


def test_one_of_two_workers_relays(postgresql_shop: OutboxShop) -> None:
    shop = postgresql_shop
    leaders = """
answer = [[each.candidates, each.state] for each in app.dq.leaders() if each.name.startswith("celery outbox")]
"""
    with shop.worker(queues="other", **QUICK) as first, shop.worker(queues="other", **QUICK):
        wait_until(lambda: shop.run(leaders) and len(shop.run(leaders)[0][0]) == 2, 30)
        shop.run(CALLS.format(0, 3))
        shop.await_empty()
        first.send_signal(signal.SIGKILL)
        shop.run(CALLS.format(3, 6))
        shop.await_empty()
    assert shop.waiting() == [*range(6)]


# SQLite has one transaction that writes at a time.
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_call_that_commits_late_is_neither_lost_nor_taken_for_a_repeated_one(
    make_shop: MakeShop, kind: str
) -> None:
    shop = make_shop(kind)
    with shop.worker(queues="other"):
        shop.run("""
import threading, time
from celery_dq.testing.waiting import wait_until
def other():
    with transaction.atomic(): notify.delay("acme", 2)
    wait_until(lambda: OutboxRow.objects.count() == 0, 30)
    connections.close_all()
with transaction.atomic():
    notify.delay("acme", 1)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
with transaction.atomic(): notify.delay("acme", 3)
""")
        shop.await_empty()
    assert shop.waiting() == [2, 1, 3]


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_long_transaction_does_not_stop_the_rows_of_others(make_shop: MakeShop, kind: str) -> None:
    shop = make_shop(kind)
    with shop.worker(queues="other"):
        shop.run("""
import threading
from celery_dq.testing.waiting import wait_until
def others():
    for number in range(60):
        with transaction.atomic(): notify.delay("acme", number)
    wait_until(lambda: OutboxRow.objects.count() == 0, 20)
    connections.close_all()
    is_empty.append(True)
is_empty = []
with transaction.atomic():
    notify.delay("acme", 60)
    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
assert is_empty
""")
        shop.await_empty()
    assert shop.waiting() == [*range(61)]


def test_the_relay_rests_after_a_slow_look_without_rows(sqlite_shop: OutboxShop) -> None:
    counts = sqlite_shop.run("""
import time
from celery_dq.clock import SystemClock
from celery_dq.contrib.django.outbox.relay_store import RelayStore
looks = []
def slowly(execute, *args):
    looks.append(1)
    time.sleep(0.3)
    return execute(*args)
store = RelayStore("default", 500, 0.1, SystemClock())
answer = []
with connections["default"].execute_wrapper(slowly):
    for _ in range(3):
        store.take()
        answer.append(len(looks))
    time.sleep(1.5)
    store.take()
    answer.append(len(looks))
""")
    assert counts == [1, 1, 1, 2]


def test_the_relay_reads_large_payloads_in_part(shop: OutboxShop) -> None:
    counts = shop.run("""
from celery_dq.clock import SystemClock
from celery_dq.contrib.django.outbox.relay_store import RelayStore
with transaction.atomic():
    for number in range(20): notify.apply_async(("acme", number), headers={"note": 400_000 * "+"})
store = RelayStore("default", 500, 0.1, SystemClock())
store.failed(store.take(), 0.2)
while not (lane := store.take()): pass
answer = [store.buffer.messages]
store.done(lane)
while lane := store.take():
    answer.append(store.buffer.messages)
    store.done(lane)
""")
    assert counts == [3, 3, 3, 3, 3, 3, 2]


def test_calls_of_one_connection_keep_their_order_for_each_tenant(postgresql_shop: OutboxShop) -> None:
    shop = postgresql_shop
    with shop.worker(queues="other", dq_buffer_batch_size=7):
        shop.run("""
for number in range(0, 200, 2):
    with transaction.atomic():
        notify.delay("acme", number)
        notify.delay("acme", number + 1)
""")
        shop.await_empty()
    assert shop.waiting() == [*range(200)]


def test_the_relay_goes_on_after_an_outage_of_its_database(make_shop: MakeShop) -> None:
    shop = make_shop("postgresql")
    name = json.loads(shop.environment["SHOP_DATABASES"])["default"]["NAME"]
    with shop.worker(queues="other"):
        shop.run(CALLS.format(0, 2))
        shop.await_empty()
        shop.run(f"""
with connections["default"].cursor() as cursor:
    cursor.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = %s AND pid <> pg_backend_pid()",
        [{name!r}],
    )
""")
        shop.run(CALLS.format(2, 4))
        shop.await_empty()
    assert shop.waiting() == [*range(4)]


def test_rows_of_a_database_without_autocommit_are_sent_once(make_shop: MakeShop) -> None:
    shop = make_shop("postgresql")
    databases = json.loads(shop.environment["SHOP_DATABASES"])
    databases["default"]["AUTOCOMMIT"] = False
    shop.run(
        """
notify.delay("acme", 1)
transaction.commit()
notify.delay("acme", 2)
transaction.rollback()
notify.delay("acme", 3)
transaction.commit()
""",
        SHOP_DATABASES=json.dumps(databases),
    )
    for _ in range(2):
        with shop.worker(SHOP_DATABASES=json.dumps(databases)):
            wait_until(lambda: len(shop.has_run()) >= 2, 30)
            shop.await_empty()
    assert shop.has_run() == [1, 3]


def test_rows_go_to_a_broker_of_kombu(make_shop: MakeShop, redis_url: str) -> None:
    shop = make_shop("sqlite")
    shop.environment["SHOP_BROKER"] = redis_url
    with shop.worker(dq_election=redis_url):
        shop.run(CALLS.format(0, 3), dq_election=redis_url)
        wait_until(lambda: len(shop.has_run()) == 3, 30)
        shop.await_empty()
    assert shop.has_run() == [0, 1, 2]
