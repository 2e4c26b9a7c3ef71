"""Faults of messages that any of several resources may take."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_LUA = "transport/redis/lua/"
_SCRIPTS = ("tests/lua/test_resource_sets.py",)
_OPERATIONS = ("tests/integration/test_resources.py",)
_NAMES = ("tests/unit/test_resource_set.py",)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "concurrency",
        "a message of a set takes no slot of the resource",
        _LUA + "include/delivery.lua",
        "now, flags, charge, resource or tenant)",
        "now, flags, charge, tenant)",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a backlog that was served stays the first of its resource",
        _LUA + "include/place_served.lua",
        "if #places > 0 then call('ZADD', P .. 'rotation:'",
        "if false then call('ZADD', P .. 'rotation:'",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a set is served to its end before the resource's own messages",
        _LUA + "include/serve_rotation.lua",
        "      rotation[#rotation + 1] = backlog\n",
        "      table.insert(rotation, 1, backlog)\n",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a message that a claim passes over keeps all backlogs of its resource from it",
        _LUA + "include/serve_rotation.lua",
        "      tenant.passed = nil\n",
        "",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a plain claim serves a resource without its sets",
        _LUA + "include/plain_claim.lua",
        " or (known[9] or '0') ~= '0'\n",
        "\n",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a plain push stores a message of a set as one of a tenant",
        _LUA + "include/plain_push.lua",
        " or string.sub(record, 28, 34) == 'any_of('",
        "",
        _SCRIPTS,
    ),
    Mutation(
        "fairness",
        "a single message of a tenant passes over the sets of its resource",
        _LUA + "claim.lua",
        "if not serving.crashes_known and state.sets == 0 then",
        "if not serving.crashes_known then",
        _SCRIPTS,
    ),
    Mutation(
        "recovery",
        "a released message waits for the resource that had it",
        _LUA + "include/release.lua",
        "entry.owner = length and dq.tenant_name(record, length) or entry.tenant",
        "entry.owner = entry.tenant",
        _SCRIPTS,
    ),
    Mutation(
        "recovery",
        "a resource with messages of sets only leaves its turn",
        _LUA + "include/tenant_placement.lua",
        " or dq.has_sets(tenant) then\n      place, score",
        " then\n      place, score",
        _SCRIPTS,
    ),
    Mutation(
        "recovery",
        "the other resources of an empty set stay in turn",
        _LUA + "include/place_served.lua",
        "for i = 1, #set.resources do resources[#resources + 1] = set.resources[i] end",
        "",
        _SCRIPTS,
    ),
    Mutation(
        "recovery",
        "a purge leaves the messages of sets",
        _LUA + "purge.lua",
        "ipairs({'resource_sets', 'turn',",
        "ipairs({'turn',",
        _SCRIPTS,
    ),
    Mutation(
        "recovery",
        "a publisher names the resource that its task gets",
        "transport/in_flight/message.py",
        "        self.headers.pop(RESOURCE_HEADER, None)\n        if entry.resource:",
        "        if entry.resource and RESOURCE_HEADER not in self.headers:",
        ("tests/broker/test_resources.py", "-k", "retry"),
    ),
    Mutation(
        "once",
        "a queue with several partitions accepts a set",
        "transport/redis/store/partition_map.py",
        "if self.total > 1 and resources_of(tenant) is not None:",
        "if False:",
        _OPERATIONS,
    ),
    Mutation(
        "once",
        "a queue is split while messages wait for a set",
        "app/api/partition_count.py",
        "            _check_no_sets(queue, count, partitions_of(channel, queue, homes)[0], client)\n",
        "",
        _OPERATIONS,
    ),
    Mutation(
        "concurrency",
        "a queue is split while delayed messages are for a set",
        "app/api/partition_count.py",
        "for key in (keys.delayed, keys.blocked)]",
        "for key in (keys.blocked,)]",
        _OPERATIONS,
    ),
    Mutation(
        "fairness",
        "two names of a set are two sets",
        "transport/resource_set.py",
        "sorted({_checked(each, resources) for each in resources})",
        "[_checked(each, resources) for each in resources]",
        _NAMES,
    ),
    Mutation(
        "shared",
        "messages of a set count as runnable although no resource has room",
        _LUA + "backlogs.lua",
        "math.min(backlogs[i][2], allowed_by_resources(names[i]))",
        "backlogs[i][2]",
        _OPERATIONS,
    ),
    Mutation(
        "shared",
        "a copy of quotas to another environment is audited in the own one",
        "app/api/broker.py",
        "            other.audit = self.audit.of_environment(lambda: other.options, other.channel)\n",
        "            other.audit = self.audit\n",
        ("tests/integration/test_quota_documents.py", "-k", "audited"),
    ),
)
