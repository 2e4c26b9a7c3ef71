"""The calls of a store, and the broker above any store."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CALLS = "tests/conformance/test_partition_stores.py"
BROKER = "tests/conformance/test_other_stores.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "stores",
        "a store keeps the number of each producer for ever",
        "testing/sqlite_partition.py",
        '"DELETE FROM producers WHERE queue = ? AND used_us <= ?",',
        '"DELETE FROM producers WHERE queue = ? AND used_us <= ? AND 0",',
        (CALLS, "-k", "forgets_producers"),
    ),
    Mutation(
        "stores",
        "a worker that stood still has no mailbox when it goes on",
        "transport/any_store/fetcher.py",
        "            if source.queue == queue.key:\n",
        "            if False:\n",
        (BROKER, "-k", "mailbox"),
    ),
    Mutation(
        "stores",
        "a store accepts an ack of an earlier delivery",
        "testing/sqlite_partition.py",
        '        where = " WHERE queue = ? AND consumer = ? AND claim = ? AND id = ?"\n',
        '        where = " WHERE queue = ? AND consumer = ? AND claim >= ? AND id = ?"\n',
        (CALLS, "-k", "earlier_delivery"),
    ),
    Mutation(
        "stores",
        "a store delivers a settled message again when its consumer is lost",
        "testing/sqlite_partition.py",
        "AND (settled OR reason <> '')",
        "AND reason <> ''",
        (CALLS, "-k", "lost_consumer_return"),
    ),
    Mutation(
        "stores",
        "the fetcher above a store renews no lease",
        "transport/any_store/fetcher.py",
        "        if now >= self._renew_at:\n",
        "        if self._renew_at == -math.inf:\n",
        (BROKER, "-k", "renewed"),
    ),
    Mutation(
        "stores",
        "a failed store ends no connection",
        "transport/any_store/fetcher.py",
        "            self.failure = error\n",
        "            pass\n",
        (BROKER, "-k", "store_that_fails"),
    ),
    Mutation(
        "stores",
        "the first queue of a consumer always has the first turn above a store",
        "transport/any_store/fetcher.py",
        "sources.index(self._served) + 1 if",
        "0 if",
        ("tests/conformance/test_delivery.py", "-k", "many_queues_serves_all and sqlite"),
    ),
    Mutation(
        "stores",
        "a worker drops an unknown task that a store could keep as a dead letter",
        "transport/aliases.py",
        'connection.get_transport_cls(), "leases_messages", False',
        'connection.get_transport_cls(), "no such name", False',
        (BROKER, "-k", "unknown_task"),
    ),
    Mutation(
        "stores",
        "a transaction whose commit fails keeps the file locked",
        "testing/sqlite_client.py",
        "if self._connection.in_transaction:",
        "if False:",
        ("tests/unit/test_sqlite_client.py", "-k", "committed"),
    ),
    Mutation(
        "stores",
        "a full disk is reported as a rollback that failed",
        "testing/sqlite_client.py",
        "if self._connection.in_transaction:",
        "if True:",
        ("tests/unit/test_sqlite_client.py", "-k", "full"),
    ),
)
