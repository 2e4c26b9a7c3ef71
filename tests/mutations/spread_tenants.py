"""Faults of tenants that live in several partitions of their queue."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_UNIT = ("tests/unit/test_shares.py",)
_MODEL = ("tests/integration/test_spread.py",)
_OPERATIONS = ("tests/integration/test_spread_operations.py",)
_MOVES = ("tests/integration/test_tenant_moves.py",)
_BY_RATE = ("tests/integration/test_spread_by_rate.py",)
_QUOTAS = ("tests/integration/test_quotas_during_changes.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "rate",
        "a rate just above the threshold spreads no tenant",
        "app/api/spread_by_rate.py",
        "-(-SECOND_US // (quota.interval_us * above_per_s))",
        "max(SECOND_US // (quota.interval_us * above_per_s), 1)",
        (*_BY_RATE, "-k", "divided_by_the_threshold"),
    ),
    Mutation(
        "rate",
        "the rate replaces a spread that a user has named",
        "app/api/spread_by_rate.py",
        "    return base.spread == spread_by_rate(base, above_per_s, opened.homes.count)",
        "    return True",
        (*_BY_RATE, "-k", "user_names"),
    ),
    Mutation(
        "rate",
        "a spread is refused where the queue does not exist yet",
        "app/api/quotas.py",
        "            count = options.queue(queue).partitions\n",
        "",
        ("tests/integration/test_quota_documents.py", "-k", "no_such_queue"),
    ),
    Mutation(
        "rate",
        "a queue with quotas only is unknown to the command line",
        "app/api/quotas.py",
        "            self._broker.declare(opened.client, queue)\n",
        "",
        ("tests/integration/test_quota_documents.py", "-k", "no_such_queue"),
    ),
    Mutation(
        "dedup",
        "a dedup key of a spread tenant runs in a new share beside its run in an old one",
        "app/api/tenant_moves.py",
        "                found[tenant].add(place)",
        "                found[tenant].discard(place)",
        _MODEL,
    ),
    Mutation(
        "dedup",
        "a call with a dedup key has its place by its task id",
        "transport/redis/store/partition_map.py",
        "        place_key = task_id if key is None else key",
        "        place_key = task_id",
        (*_OPERATIONS, "-k", "dedup_key"),
    ),
    Mutation(
        "custody",
        "all messages of a spread tenant go to its first share",
        "transport/redis/store/home.py",
        "    return 0 if spread == 1 else jump_hash(_hash(key), spread)",
        "    return 0 if spread else jump_hash(_hash(key), spread)",
        (*_MODEL, "-k", "in_its_partitions"),
    ),
    Mutation(
        "concurrency",
        "a new share starts messages while the old one runs more than its part",
        "transport/redis/lua/departed.lua",
        "slots_of(slots[i]) <= quotas[i].concurrency",
        "slots_of(slots[i]) >= 0",
        (*_OPERATIONS, "-k", "run_in_the_old"),
    ),
    Mutation(
        "concurrency",
        "the remainder of a divided concurrency is lost",
        "options/quota.py",
        "        return max(each + (share < more), 1)",
        "        return max(each, 1)",
        (*_UNIT, "-k", "make_the_whole"),
    ),
    Mutation(
        "concurrency",
        "a share that moves gets the part of the first one",
        "app/api/tenant_settings.py",
        "quota.pack(homes.shares_by_partition(tenant)[number], homes.widest(tenant))",
        "quota.pack(0, homes.widest(tenant))",
        (*_OPERATIONS, "-k", "share_has_moved"),
    ),
    Mutation(
        "concurrency",
        "the shares of a lower spread keep the parts of the higher one",
        "app/api/tenant_settings.py",
        ".pack(share, len(shares))",
        ".pack(share, homes.widest(tenant))",
        (*_OPERATIONS, "-k", "share_has_moved"),
    ),
    Mutation(
        "concurrency",
        "a partition takes the share of an old map",
        "transport/redis/lua/quota.lua",
        "if dq.stored_map() ~= ARGV[4] then return 0 end\n",
        "",
        (*_QUOTAS, "-k", "shares_of_now"),
    ),
    Mutation(
        "concurrency",
        "a pause by an old map misses the new homes of its tenant",
        "transport/redis/lua/pause.lua",
        "if dq.stored_map() ~= ARGV[6] then return {'-2', '0', '0'} end\n",
        "",
        (*_QUOTAS, "-k", "pause_by_the_map"),
    ),
    Mutation(
        "concurrency",
        "a quota by an old map is not set again",
        "app/api/broker.py",
        "                if attempts == MOST_ATTEMPTS:",
        "                if attempts:",
        (*_QUOTAS, "-k", "shares_of_now"),
    ),
    Mutation(
        "concurrency",
        "the settings of a worker miss partitions that were added meanwhile",
        "transport/redis/lua/settings_quota.lua",
        "if dq.stored_map() ~= ARGV[5] then",
        "if false then",
        (*_QUOTAS, "-k", "reaches_partitions"),
    ),
    Mutation(
        "concurrency",
        "a process that completes a change does not divide the quota",
        "app/api/map_change.py",
        "    align_settings(partitions, client)\n",
        "",
        (*_QUOTAS, "-k", "another_process_completes"),
    ),
    Mutation(
        "rate",
        "a changed number of partitions moves all shares",
        "transport/redis/store/partition_map.py",
        "each if each < count else next(others)",
        "each if each < 0 else next(others)",
        (*_UNIT, "-k", "partition_that_goes"),
    ),
    Mutation(
        "custody",
        "a tenant that came to partition 0 by an earlier change is served there at once",
        "transport/redis/lua/set_partitions.lua",
        "call('UNLINK', P .. 'arrived')\n",
        "",
        (*_MOVES, "-k", "partition_0"),
    ),
    Mutation(
        "shared",
        "a list of tenants shows one share of a spread tenant",
        "inspector/tenants.py",
        "        if each.tenant not in homes.spreads\n",
        "        if each\n",
        (*_OPERATIONS, "-k", "one_tenant"),
    ),
    Mutation(
        "shared",
        "a quota that is to be removed keeps its spread until then",
        "app/api/tenant_settings.py",
        "replace(Quota.unpack(self.quotas[name]), spread=len(homes.partitions(tenant)))",
        "Quota.unpack(self.quotas[name])",
        (*_OPERATIONS, "-k", "to_be_removed"),
    ),
    Mutation(
        "shared",
        "messages that come from another queue go to the first share",
        "app/api/move.py",
        "place = first.homes.route(first.keys.queue, record, task_id)",
        "place = (first.homes.home(tenant_of(record)), False)",
        (*_OPERATIONS, "-k", "moved_and_purged"),
    ),
)
