"""Changes of the partitions of a queue, and what a failover or noise does to them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FAILOVERS = ("tests/integration/test_moves_and_failovers.py",)
_NOISE = ("tests/integration/test_moves_of_noise.py",)
_REPLICAS = ("tests/integration/test_missing_replicas.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "shared",
        "partitions learn a map that a failover takes away from the one that decides",
        "app/api/map_change.py",
        "first, client, options.confirm_replicas)",
        "first, client, 0)",
        (*_FAILOVERS, "-k", "begin or end"),
    ),
    Mutation(
        "shared",
        "a failover brings messages back that have moved",
        "app/api/tenant_moves.py",
        "            outbox = self._run_confirmed(source, call)\n",
        "            outbox = call.run(self._client)\n",
        (*_FAILOVERS, "-k", "export"),
    ),
    Mutation(
        "shared",
        "a failover loses messages that their new home has just got",
        "app/api/tenant_moves.py",
        "if not self._run_confirmed(to, store):",
        "if not store.run(self._client):",
        (*_FAILOVERS, "-k", "import"),
    ),
    Mutation(
        "shared",
        "a failover leaves a tenant unserved that arrives at the end of a change",
        "app/api/tenant_moves.py",
        "(expected := self._run_confirmed(partition, call))",
        "(expected := call.run(self._client))",
        (*_FAILOVERS, "-k", "arrives"),
    ),
    Mutation(
        "shared",
        "a step of a change is confirmed by replicas of a master that lacks it",
        "transport/redis/store/move_calls.py",
        "        marker = partition.keys.producer(uuid.uuid4().hex)\n",
        "        connection.close()\n        connection.open()\n        marker = 'm'\n",
        _FAILOVERS,
    ),
    Mutation(
        "shared",
        "a delayed message that cannot be read keeps its partition until it is due",
        "transport/redis/lua/export_messages.lua",
        "elseif due and (not dq.header(record) or not dq.is_keyed(record)) then",
        "elseif due and not dq.is_keyed(record) then",
        (*_NOISE, "-k", "leaves"),
    ),
    Mutation(
        "shared",
        "a delayed message that cannot be read holds calls without a tenant up",
        "app/api/tenant_moves.py",
        '_UNREADABLE = "\\0"',
        '_UNREADABLE = ""',
        (*_NOISE, "-k", "cut"),
    ),
    Mutation(
        "shared",
        "a cancellation fails while replicas are missing",
        "app/api/tenant_moves.py",
        "if missing is not None and wants_all:",
        "if missing is not None:",
        (*_REPLICAS, "-k", "cancellation"),
    ),
    Mutation(
        "shared",
        "a purge that misses an outbox says that it is complete",
        "app/api/tenant_moves.py",
        "if missing is not None and wants_all:",
        "if False:",
        (*_REPLICAS, "-k", "purge"),
    ),
)
