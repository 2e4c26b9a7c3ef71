"""The tenant broker on a Redis Cluster."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "custody",
        "a script runs on a node that has only some of its keys",
        "transport/redis/lua/include/partition.lua",
        "--@cluster if type(redis.pcall('EXISTS', P .. 'none')) == 'table' then",
        "--@cluster if false then",
        ("tests/cluster/test_cluster_scripts.py", "-k", "no_script_runs"),
    ),
    Mutation(
        "custody",
        "a script follows an ASK to a node that has only some of its keys",
        "transport/redis/store/cluster_connection.py",
        " and name_of(self.commands[0]) not in SCRIPTED",
        "",
        ("tests/cluster/test_cluster_scripts.py", "-k", "no_script_runs"),
    ),
    Mutation(
        "shared",
        "a caller gets a redirection, for which it would name the wrong remedy",
        "transport/redis/store/slot_map.py",
        "    if isinstance(answer, (AskError, MovedError, TryAgainError)):\n",
        "    if isinstance(answer, TryAgainError):\n",
        ("tests/cluster/test_cluster_connection.py", "-k", "waits_too_long"),
    ),
    Mutation(
        "shared",
        "a node of a cluster of Valkey is taken for a single server",
        "transport/redis/store/server_checks.py",
        'in (info.get("redis_mode"), info.get("server_mode"))',
        'in (info.get("redis_mode"),)',
        ("tests/cluster/test_cluster_addresses.py", "-k", "names_its_mode"),
    ),
    Mutation(
        "custody",
        "replicas are waited for on one of the nodes only",
        "transport/redis/store/cluster_commands.py",
        "        return min(answers)\n",
        "        return max(answers)\n",
        ("tests/cluster/test_cluster_connection.py", "-k", "replicas"),
    ),
    Mutation(
        "shared",
        "a push of a plain message announces no wake-up on a cluster",
        "transport/redis/lua/include/plain_push.lua",
        "    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))\n",
        "",
        ("tests/cluster/test_cluster_consumers.py", "-k", "idle_consumer"),
    ),
    Mutation(
        "shared",
        "a queue whose slot has moved stays subscribed at its old node",
        "transport/redis/consuming/sharded_wakeups.py",
        "            self._groups.moved(self, key)\n",
        "            pass\n",
        ("tests/cluster/test_cluster_consumers.py", "-k", "takes_its_consumers"),
    ),
    Mutation(
        "heartbeat",
        "a trip brings a script to one node of a cluster only",
        "transport/redis/store/script_batches.py",
        "    while unknown := ",
        "    if unknown := ",
        ("tests/cluster/test_cluster_scripts.py", "-k", "heartbeats_bring"),
    ),
    Mutation(
        "custody",
        "a batch of messages brings its script to one node of a cluster only",
        "transport/redis/store/publisher.py",
        "    while unknown := ",
        "    if unknown := ",
        ("tests/cluster/test_cluster_scripts.py", "-k", "batch_brings"),
    ),
)
