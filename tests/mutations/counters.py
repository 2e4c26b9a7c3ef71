"""The counters in the state of a partition."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "shared",
        "the counts of a tenant are wrong after the clock has jumped back",
        "transport/redis/lua/include/place_served.lua",
        " or struct.unpack('>d', entry, 9) > now then",
        " then",
        ("tests/lua/test_claim_rates.py", "-k", "jumped"),
    ),
    Mutation(
        "shared",
        "the window of a partition does not end after the clock has jumped back",
        "transport/redis/lua/claim.lua",
        "if window_age < 0 then window_age = math.huge end",
        "",
        ("tests/lua/test_claim_rates.py", "-k", "jumped"),
    ),
    Mutation(
        "shared",
        "a plain push is not counted",
        "transport/redis/lua/include/plain_push.lua",
        "digits((known[6] or 0) + 1)",
        "digits((known[6] or 0) + 0)",
        ("tests/lua/test_plain.py", "tests/lua/test_counters.py"),
    ),
    Mutation(
        "shared",
        "a plain claim does not count its messages",
        "transport/redis/lua/include/plain_claim.lua",
        "state[9], state[10] = 'waits_alone'",
        "state[9], state[10] = 'waits'",
        ("tests/lua/test_plain.py", "tests/lua/test_counters.py"),
    ),
    Mutation(
        "shared",
        "a message that waited behind others counts as alone in line",
        "transport/redis/lua/include/serve_tenant.lua",
        "crashes, '', record, backlog.single,",
        "crashes, '', record, true,",
        ("tests/lua/test_counters.py",),
    ),
    Mutation(
        "shared",
        "discards whose end was recorded count as finished",
        "transport/redis/lua/include/finish.lua",
        "if count > 0 then call('HINCRBY'",
        "if false then call('HINCRBY'",
        ("tests/lua/test_counters.py", "tests/properties/test_partition_model.py"),
    ),
    Mutation(
        "shared",
        "the oldest message is not looked for behind more urgent ones",
        "transport/redis/lua/oldest_waiting.lua",
        "if priority <= 0 then break end",
        "if true then break end",
        ("tests/lua/test_counters.py",),
    ),
    Mutation(
        "fairness",
        "the counts of a tenant's claims outlive its backlog",
        "transport/redis/lua/include/tenant_placement.lua",
        "  if #idle > 0 then dq.stop_counting(idle) end\n",
        "",
        ("tests/lua/test_claim_rates.py",),
    ),
    Mutation(
        "fairness",
        "the messages of the claim that ends a window are not counted",
        "transport/redis/lua/include/place_served.lua",
        "since, count, before, count_before = now, 0, since, count end",
        "since, count, before, count_before = now, 0, since, count - served end",
        ("tests/lua/test_claim_rates.py",),
    ),
    Mutation(
        "custody",
        "a record is replaced although it has changed since it was read",
        "transport/redis/lua/edit.lua",
        "if new_record ~= '' and record ~= before then priority = nil end",
        "",
        ("tests/lua/test_edit.py",),
    ),
)
