"""``celery dq migrate``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KILLS = ("tests/migration/test_kills.py",)
MIGRATE = "tests/migration/test_migrate.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "once",
        "each run of a migration numbers its messages as another producer",
        "migration/stock_broker.py",
        'self.client.hsetnx(state, "producer",',
        'self.client.hset(state, "producer",',
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
)
