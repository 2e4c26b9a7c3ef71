"""Faults of the script of the heartbeat."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "heartbeat",
        "a lost consumer of an empty partition keeps its lease",
        "transport/redis/lua/heartbeat.lua",
        "if first > 0 and limit > 0",
        "if limit > 0",
        ("tests/lua/test_return.py", "-k", "empty_partition"),
    ),
    Mutation(
        "heartbeat",
        "a heartbeat counts nothing again where no message is left",
        "transport/redis/lua/heartbeat.lua",
        "'held', '0', 'next_look_owner'",
        "'next_look_owner'",
        ("tests/lua/test_return.py", "-k", "empty_partition"),
    ),
    Mutation(
        "custody",
        "the tombstones of an empty partition stay for ever",
        "transport/redis/lua/heartbeat.lua",
        "P .. 'limiter', P .. 'tombstones', P .. 'dead') == 0 then",
        "P .. 'limiter', P .. 'dead') == 0 then",
        ("tests/lua/test_return.py", "-k", "empty_partition"),
    ),
    Mutation(
        "heartbeat",
        "a late heartbeat takes its own messages for a dead worker's",
        "transport/redis/lua/heartbeat.lua",
        "renew_lease(consumer, alive, tonumber(ARGV[2]))\n",
        "if not alive or tonumber(alive) > now then renew_lease(consumer, alive, tonumber(ARGV[2])) end\n",
        (
            "tests/lua/test_return.py",
            "-k",
            "Late or expired or late or coming",
        ),
    ),
    Mutation(
        "heartbeat",
        "the dead letters of an empty partition are kept for ever",
        "transport/redis/lua/heartbeat.lua",
        "P .. 'tombstones', P .. 'dead') == 0 then",
        "P .. 'tombstones') == 0 then",
        ("tests/lua/test_dead_letter_retention.py",),
    ),
    Mutation(
        "heartbeat",
        "a pause of a tenant does not end while its partition is empty",
        "transport/redis/lua/heartbeat.lua",
        " and (known[7] or '0') == '0'",
        "",
        ("tests/lua/test_pauses.py",),
    ),
    Mutation(
        "heartbeat",
        "a process exits while its heartbeat thread closes a greenlet's loop",
        "transport/redis/in_flight/heartbeat.py",
        "            return not self._running\n",
        "            atexit.unregister(self._send_pending_acks_at_exit)\n"
        "            return not self._running\n",
        ("tests/broker/test_exits.py",),
    ),
)
