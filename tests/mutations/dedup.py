"""Dedup keys: the claims in Redis and in memory, and the workers that ask for them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OTHERS = "tests/dedup/test_other_brokers.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "dedup",
        "a task that is revoked on its way to the pool keeps its key",
        "worker/dedup_locks.py",
        "self._over(self._running.pop(request), None)",
        "self._running.pop(request)",
        ("tests/dedup/test_other_processes.py", "-k", "gives_it_back"),
    ),
    Mutation(
        "dedup",
        "a task that waits for a process keeps its key when the connection is lost",
        "worker/dedup_locks.py",
        "                self.forgotten(request)\n",
        "                pass\n",
        ("tests/dedup/test_other_processes.py", "-k", "back_with_the_connection"),
    ),
    Mutation(
        "dedup",
        "the end of a run is reported twice, and the second report finds no key",
        "worker/task_events.py",
        "        if self._events.remove(self):\n",
        "        if [self._events.remove(self)]:\n",
        ("tests/dedup/test_other_processes.py", "-k", "time_limit_ends"),
    ),
    Mutation(
        "dedup",
        "a revoked task that waits keeps its place",
        "worker/dedup_locks.py",
        ("            if revoked:\n                self._coordinator.withdraw(holding.key, holding.call)\n"),
        "",
        (OTHERS + "::test_a_revoked_task_that_waits_leaves_its_place[redis]",),
    ),
    Mutation(
        "dedup",
        "the key of a retry that is not due yet is not renewed",
        "worker/dedup_locks.py",
        "                self._hold(waits)\n",
        "",
        (OTHERS, "-k", "renewed_until_it_is_due"),
    ),
    Mutation(
        "dedup",
        "a run that ends as its Redis falls silent keeps its key",
        "worker/dedup_locks.py",
        ("            self.unasked.silent(error)\n            self._ended.append((holding, exc, True))\n"),
        "            self.unasked.silent(error)\n",
        ("tests/dedup/test_outages.py", "-k", "ends_during and full"),
    ),
    Mutation(
        "dedup",
        "a call whose covering run has died waits for ever",
        "worker/declined_calls.py",
        "missing = moment if covered.missing is None else covered.missing",
        "missing = moment",
        (OTHERS, "-k", "without_a_result and redis"),
    ),
    Mutation(
        "dedup",
        "a call whose key is answered by an error is forgotten",
        "worker/unanswered_calls.py",
        "self._calls.append(self._calls.pop(0))",
        "self._calls.pop(0)",
        (OTHERS + "::test_a_coordinator_that_does_not_answer_is_asked_again[redis]",),
    ),
    Mutation(
        "dedup",
        "a claim expires with the call that renews last, not with the longest lease",
        "dedup/other_brokers/lua/include/dedup_lock.lua",
        "lease = math.max(lease, each.lease)",
        "lease = each.lease",
        ("tests/dedup/test_redis.py", "-k", "outlives_the_shorter"),
    ),
    Mutation(
        "dedup",
        "a run ends with a void token",
        "dedup/other_brokers/lua/leave.lua",
        "place and mine.token == token and",
        "place and",
        ("tests/dedup/test_coordinator.py", "-k", "void_token"),
    ),
    Mutation(
        "dedup",
        "a thread that is interrupted while it waits stays in its place",
        "dedup/local.py",
        "            except BaseException:\n",
        "            except Exception:\n",
        ("tests/dedup/test_threads.py", "-k", "interrupted"),
    ),
    Mutation(
        "dedup",
        "a Redis that has forgotten the scripts takes all keys away",
        "dedup/other_brokers/redis_coordinator.py",
        'reply = self._run("heartbeat", key, call, token, self._lease_ms)',
        "reply = 0",
        ("tests/dedup/test_redis.py::test_scripts_that_the_server_forgot",),
    ),
)
