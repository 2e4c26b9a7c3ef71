"""Faults in the allocation of partitions to workers."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROPERTIES = "tests/properties/test_allocation.py"
REBALANCER = "tests/allocation/test_rebalancer.py"
FOLLOWING = "tests/allocation/test_following.py"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "shared",
        "a worker that has found no assignment counts the time before as a silence of its broker",
        "allocation/follower.py",
        "            self._serves_all = True\n            self._expect_heartbeats()\n",
        "            self._serves_all = True\n",
        ("tests/allocation/test_following.py", "-k", "without_zookeeper"),
    ),
    Mutation(
        "calls",
        "a full worker gets further partitions",
        "allocation/ring.py",
        "while not room[ring[at][1]]:",
        "while room[ring[at][1]] is None:",
        (PROPERTIES,),
    ),
    Mutation(
        "calls",
        "the place of a partition depends on the number of partitions",
        "allocation/ring.py",
        "number * _STEP",
        "number * (2**64 // len(units))",
        (PROPERTIES,),
    ),
    Mutation(
        "calls",
        "a draining worker gets partitions",
        "allocation/assignment.py",
        "(leaving if member.draining else staying)",
        "staying",
        (PROPERTIES, REBALANCER),
    ),
    Mutation(
        "calls",
        "the partitions of a lost worker wait like a join",
        "allocation/rebalancer.py",
        "if self._current.is_served(members):",
        "if self._current.servers:",
        (REBALANCER,),
    ),
    Mutation(
        "calls",
        "after an outage, the worker that is back first gets all partitions",
        "allocation/rebalancer.py",
        "elif now < self._returned_at and",
        "elif now < 0 and",
        (REBALANCER, "-k", "outage"),
    ),
    Mutation(
        "calls",
        "each join moves partitions at once",
        "allocation/rebalancer.py",
        "if now < balance_at:",
        "if balance_at < now:",
        (REBALANCER,),
    ),
    Mutation(
        "calls",
        "a former allocator publishes over a later one",
        "allocation/published.py",
        "current.token > token",
        "current.token > 9",
        (REBALANCER, "-k", "former"),
    ),
    Mutation(
        "calls",
        "a worker whose removal got no answer never registers again",
        "allocation/members.py",
        "        # The answer may be lost after the deletion.\n        self._written = None\n",
        "        # The answer may be lost after the deletion.\n",
        (REBALANCER, "-k", "answer_was_lost"),
    ),
    Mutation(
        "calls",
        "a node that changes before its answer is read is never read again",
        "allocation/members.py",
        "        self._changed.add(name)\n",
        "",
        (REBALANCER, "-k", "before_its_answer"),
    ),
    Mutation(
        "calls",
        "partitions come before others have gone",
        "allocation/follower.py",
        "        self._serve(kept)",
        "        self._serve(dict(target))",
        (FOLLOWING, "-k", "before_others"),
    ),
    Mutation(
        "calls",
        "a worker without ZooKeeper serves nothing",
        "allocation/follower.py",
        "if waited_s > self._session.timeout_s:",
        "if waited_s > 9 * self._session.timeout_s + 60:",
        (FOLLOWING, "-k", "without_zookeeper"),
    ),
    Mutation(
        "calls",
        "a worker that its broker does not answer keeps its partitions",
        "allocation/follower.py",
        "return serves and now",
        "return not serves and now",
        (FOLLOWING, "-k", "silent"),
    ),
    Mutation(
        "calls",
        "a pinned partition is given away",
        "transport/redis/consuming/partition_consumers.py",
        "if not queue.is_pinned:",
        "if queue:",
        ("tests/broker/test_allocated_partitions.py", "-k", "not_reported"),
    ),
)
