"""The metrics."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BACKLOGS = ("tests/lua/test_backlogs.py",)
METRICS = ("tests/metrics/test_metrics.py",)
FAULTS = ("tests/metrics/test_faults.py",)

TRACING = ("tests/broker/test_tracing.py", "tests/producer/test_traced_sender.py")

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "shared",
        "messages beyond the rate of a tenant count as runnable",
        "transport/redis/lua/backlogs.lua",
        "if quota.interval > 0 then count =",
        "if false then count =",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "messages beyond the concurrency of a tenant count as runnable",
        "transport/redis/lua/backlogs.lua",
        "if quota.concurrency > 0 then count = math.min(count, quota.concurrency - slots) end",
        "",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "a throttled tenant is not runnable before a consumer looks",
        "transport/redis/lua/backlogs.lua",
        "for i = 1, #names do times[i] = tonumber(found[2 * i]) end",
        "",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "messages of a paused queue count as runnable",
        "transport/redis/lua/backlogs.lua",
        "state.paused_until > now and {} or starts()",
        "starts()",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "a tenant whose pause is over is not runnable before a consumer looks",
        "inspector/backlogs.py",
        "has_resumed and not is_paused)",
        "False)",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "the metrics do not show the pause of a queue",
        "metrics/state.py",
        "return self.snapshot.pause is not None if",
        "return False if",
        METRICS,
    ),
    Mutation(
        "shared",
        "due messages wake no worker",
        "inspector/backlogs.py",
        "any(due <= now for _, due in first)",
        "any(due < 0 for _, due in first)",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "a message whose ETA has not come counts as runnable",
        "inspector/backlogs.py",
        "any(due <= now for _, due in first)",
        "bool(first)",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "eligible tenants that are not read do not count",
        "inspector/backlogs.py",
        "runnable += max(size - seen, 0)",
        "runnable += 0",
        BACKLOGS,
    ),
    Mutation(
        "shared",
        "a scrape waits for the broker as long as it takes",
        "metrics/shared_state.py",
        "latest.ended.wait(max(latest.started + self._timeout_s - now, 0.0))",
        "latest.ended.wait()",
        FAULTS,
    ),
    Mutation(
        "shared",
        "each scrape reads the broker",
        "metrics/shared_state.py",
        "latest is None or (latest.ended.is_set() and now - latest.started >= MAX_AGE_S)",
        "True",
        FAULTS,
    ),
    Mutation(
        "shared",
        "a connection without an answer is used again",
        "metrics/state.py",
        "            self.close()\n            raise",
        "            raise",
        FAULTS,
    ),
    Mutation(
        "shared",
        "consumers with an expired lease count as living",
        "metrics/state.py",
        "each.lease_s > 0",
        "True",
        METRICS,
    ),
    Mutation(
        "shared",
        "the name of all other tenants may be that of one",
        "metrics/state.py",
        "if each.tenant != OTHER_TENANTS",
        "if True",
        METRICS,
    ),
    Mutation(
        "shared",
        "a child of the pool keeps the port of the metrics",
        "metrics/server.py",
        "            inherited.socket.close()",
        "            pass",
        ("tests/metrics/test_processes.py",),
    ),
    Mutation(
        "shared",
        "each scrape of a broker that hangs starts a thread",
        "metrics/shared_state.py",
        "(latest.ended.is_set() and now - latest.started >= MAX_AGE_S)",
        "now - latest.started >= MAX_AGE_S",
        ("tests/metrics/test_faults.py", "-k", "begin_one_reading"),
    ),
    Mutation(
        "shared",
        "a dead letter that no worker could run leaves no trace",
        "worker/discards.py",
        "    task_events(consumer).exhausted(message, why)\n",
        "",
        TRACING,
    ),
    Mutation(
        "shared",
        "a worker without a tracer provider warns at each span",
        "tracing/worker_step.py",
        "            self._has_warned = True\n",
        "",
        TRACING,
    ),
    Mutation(
        "once",
        "a span that cannot be made keeps a batch in the buffer",
        "tracing/sender.py",
        "except Exception:  #",
        "except KeyError:  #",
        TRACING,
    ),
    Mutation(
        "shared",
        "the span of a batch has no links to its calls",
        "tracing/spans.py",
        "if context.is_valid]",
        "if not context.is_valid]",
        TRACING,
    ),
)
