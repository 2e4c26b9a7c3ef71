"""The push script, its short path for a plain message, and the wait for replicas."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "once",
        "a push accepts a sequence that the partition has seen",
        "transport/redis/lua/push.lua",
        "if producer ~= '' and sequence <= last then",
        "if producer ~= '' and sequence < last then",
        ("tests/lua/test_push.py",),
    ),
    Mutation(
        "once",
        "a push does not say that a message got another id than its task",
        "transport/redis/lua/push.lua",
        "if message.reason or message.id ~= ids[i] then",
        "if message.reason then",
        ("tests/lua/test_push.py",),
    ),
    Mutation(
        "once",
        "a push answers with a number although a message was cancelled",
        "transport/redis/lua/push.lua",
        "if next(replies) == nil then return count end",
        "if #unique == count then return count end",
        ("tests/lua/test_cancel.py", "tests/lua/test_push.py"),
    ),
    Mutation(
        "fairness",
        "a plain message goes before the tenants that were served",
        "transport/redis/lua/include/plain_push.lua",
        "    v = digits(math.max(v, math.min(floor, v + 1)))\n",
        "",
        ("tests/lua/test_plain.py",),
    ),
    Mutation(
        "once",
        "a plain push takes a partition with messages for an idle one",
        "transport/redis/lua/include/plain_push.lua",
        "P .. 'limiter', single, dead, backlog, wake)",
        "P .. 'limiter', dead, wake)",
        ("tests/lua/test_plain.py",),
    ),
    Mutation(
        "once",
        "a plain push accepts a sequence that the partition has seen",
        "transport/redis/lua/include/plain_push.lua",
        "if last and not (tonumber(sequence) > (tonumber(last) or math.huge)) then",
        "if false then",
        ("tests/lua/test_plain.py", "tests/lua/test_push.py"),
    ),
    Mutation(
        "once",
        "a plain push keeps the record of a sequence that the partition has seen",
        "transport/redis/lua/include/plain_push.lua",
        "      call('HDEL', messages, id)\n",
        "",
        ("tests/lua/test_plain.py",),
    ),
    Mutation(
        "once",
        "a plain push forgets the last sequence for an earlier one",
        "transport/redis/lua/include/plain_push.lua",
        "      call('SET', marker, last, 'PX', marker_ttl_ms)\n",
        "",
        ("tests/lua/test_plain.py",),
    ),
    Mutation(
        "calls",
        "a push waits for replicas longer than for an answer of the server",
        "transport/redis/store/publisher.py",
        "max(1, min(CONFIRM_TIMEOUT_MS, int(socket_timeout_s * 1000 * CONFIRM_SHARE)))",
        "CONFIRM_TIMEOUT_MS",
        ("tests/producer/test_confirm_replicas.py", "-k", "short_timeout"),
    ),
    Mutation(
        "calls",
        "a call waits for absent replicas again and again",
        "app/timeouts.py",
        "if isinstance(error, TooFewReplicas) and call.latest < math.inf:",
        "if False:",
        ("tests/producer/test_confirm_replicas.py", "-k", "waits_once"),
    ),
    Mutation(
        "calls",
        "a call of a running task does not wait for absent replicas",
        "app/timeouts.py",
        "if isinstance(error, TooFewReplicas) and call.latest < math.inf:",
        "if isinstance(error, TooFewReplicas):",
        ("tests/producer/test_confirm_replicas.py", "-k", "running_task"),
    ),
    Mutation(
        "buffer",
        "the buffer gives up a message that its replicas did not confirm",
        "app/senders.py",
        "raise BrokerUnreachable(described(error)) from error",
        "raise (PublishRefused if 'replicas' in str(error) else BrokerUnreachable)(described(error))",
        ("tests/producer/test_confirm_replicas.py", "-k", "buffer"),
    ),
)
