"""``celery dq migrate``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KILLS = ("tests/migration/test_kills.py",)
MIGRATE = "tests/migration/test_migrate.py"
RETURN = "tests/migration/test_return.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "once",
        "a migration after a look begins without a choice of priorities",
        "app/api/migration.py",
        "        self._report.require_priorities()\n",
        "",
        ("tests/migration/test_migrate.py", "-k", "asked_for"),
    ),
    Mutation(
        "once",
        "each run of a migration numbers its messages as another producer",
        "migration/stock_broker.py",
        'pipeline.hsetnx(self._keys.state, "producer",',
        'pipeline.hset(self._keys.state, "producer",',
        KILLS,
    ),
    Mutation(
        "once",
        "the numbers of staged messages begin at one in each step",
        "app/api/migration.py",
        "producer, sent + place) for",
        "producer, place) for",
        KILLS,
    ),
    Mutation(
        "custody",
        "a staged message is confirmed that was not sent",
        "app/api/migration.py",
        "            channel.publisher.push(queue, messages)\n",
        "            channel.publisher.push(queue, messages[1:] or messages)\n",
        KILLS,
    ),
    Mutation(
        "custody",
        "a migration takes the messages of a living worker",
        "app/api/migration.py",
        "                if not self._report.held_by:\n",
        "                if True:\n",
        (MIGRATE, "-k", "live_worker"),
    ),
    Mutation(
        "shared",
        "equal messages that cannot be read hide those behind them",
        "app/api/migration.py",
        "CHUNK + left.total())",
        "CHUNK + len(left))",
        (MIGRATE, "-k", "equal"),
    ),
    Mutation(
        "once",
        "a batch on its way back gets another name in each process",
        "migration/tenant_source.py",
        "ids = sorted(entry.id for entry in self.entries)",
        "ids = [*(entry.id for entry in self.entries), id(self)]",
        (*KILLS, "-k", "back"),
    ),
    Mutation(
        "once",
        "the stock broker takes a batch that it has",
        "migration/lua/receive.lua",
        "if redis.call('HSETNX', KEYS[1], ARGV[1], '1') == 0 then return 0 end",
        "redis.call('HSET', KEYS[1], ARGV[1], '1')",
        (*KILLS, "-k", "back"),
    ),
    Mutation(
        "custody",
        "a migration back forgets the batches of an interrupted one",
        "app/api/return_migration.py",
        "for interrupted in source.interrupted():",
        "for interrupted in source.interrupted()[:0]:",
        (*KILLS, "-k", "back"),
    ),
    Mutation(
        "custody",
        "the end of a migration back releases what another one has taken",
        "migration/tenant_source.py",
        "self._partition.resign(self._consumer, limit=0)",
        "self._partition.resign(self._consumer)",
        (RETURN, "-k", "leaves_another"),
    ),
    Mutation(
        "custody",
        "messages of an interrupted migration are forgotten by the one back",
        "app/api/return_migration.py",
        "            if staged:",
        "            if False:",
        ("tests/migration/test_return.py", "-k", "before_the_way_back"),
    ),
    Mutation(
        "custody",
        "messages of an interrupted migration back are forgotten by the one there",
        "app/api/migration.py",
        "            if held:",
        "            if False:",
        ("tests/migration/test_return.py", "-k", "before_the_way_there"),
    ),
)
