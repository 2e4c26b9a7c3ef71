"""The rules of the machine and the coordinators, each broken once."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A broken rule: in this file of the package, `new` replaces `old`, whose text is there exactly once."""

    kind: str
    what: str
    file: str
    old: str
    new: str


COORDINATORS = (
    # The machine itself, which is the oracle: the ledger and the scripts must find these faults.
    Mutation("local", "a head that runs covers", "dedup/machine.py", "if not head.started and (", "if ("),
    Mutation(
        "local",
        "two tails",
        "dedup/machine.py",
        "if self.tail is not None:\n            return",
        "if False:\n            return",
    ),
    Mutation(
        "local",
        "no call is promoted",
        "dedup/machine.py",
        "self.head, self.tail = self.tail, None",
        "self.head = None",
    ),
    Mutation(
        "local",
        "the tail before the heir",
        "dedup/machine.py",
        "self.head, self.heir = self.heir, None",
        "self.head, self.tail = self.tail or self.heir, None",
    ),
    Mutation("local", "a stale token ends a run", "dedup/machine.py", "and self.head.token == token > 0", ""),
    Mutation("local", "a redelivered tail is declined", "dedup/machine.py", "self.tail.id == again", "False"),
    # The coordinator of threads.
    Mutation(
        "local",
        "an overdue head is not evicted",
        "dedup/local.py",
        "if about.timeout is not None:",
        "if False:",
    ),
    Mutation(
        "local",
        "an idle key is kept",
        "dedup/local.py",
        "            del self._kept[key]\n",
        "            pass\n",
    ),
    Mutation(
        "local",
        "the time of a run counts from its call",
        "dedup/local.py",
        "since = now = self._clock.monotonic()",
        "since = now = kept.calls[call].since",
    ),
    Mutation(
        "local",
        "a retry waits behind the tail",
        "dedup/local.py",
        "continues = (head.id, head.token)",
        "pass",
    ),
    Mutation(
        "local", "renewing does not look at the token", "dedup/local.py", "and head.token == token)", ")"
    ),
    Mutation(
        "local",
        "tokens begin at 1 for each key",
        "dedup/local.py",
        "token = next(self._tokens)",
        "token = kept.machine.token + 1",
    ),
    # The coordinator in Redis.
    Mutation(
        "redis",
        "a stale token ends a run",
        "other_brokers/lua/leave.lua",
        "mine.token == token and",
        "(token > 0) == (mine.token > 0) and",
    ),
    Mutation(
        "redis",
        "a run can be withdrawn",
        "other_brokers/lua/leave.lua",
        "mine.token == token and (how == 'withdraw') == (token == 0)",
        "(how == 'withdraw' or mine.token == token)",
    ),
    Mutation(
        "redis",
        "a finish promotes no call",
        "other_brokers/lua/leave.lua",
        "if place == 'head' then promote() else",
        "if place == 'head' then dedup_lock.head = nil else",
    ),
    Mutation(
        "redis",
        "a finish promotes twice",
        "other_brokers/lua/leave.lua",
        "then promote() else",
        "then promote() promote() else",
    ),
    Mutation(
        "redis",
        "a release keeps the token",
        "other_brokers/lua/leave.lua",
        "mine.token, mine.since = 0, 0",
        "mine.since = 0",
    ),
    Mutation(
        "redis",
        "the time of a run begins early",
        "other_brokers/lua/include/dedup_lock.lua",
        "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now",
        "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now - 5000000",
    ),
    Mutation(
        "redis",
        "a dead tail stays",
        "other_brokers/lua/include/dedup_lock.lua",
        "for _, place in ipairs({'heir', 'tail'}) do\n  if",
        "for _, place in ipairs({'heir'}) do\n  if",
    ),
    Mutation(
        "redis",
        "a dead heir stays",
        "other_brokers/lua/include/dedup_lock.lua",
        "for _, place in ipairs({'heir', 'tail'}) do\n  if",
        "for _, place in ipairs({'tail'}) do\n  if",
    ),
    Mutation(
        "redis",
        "a dead head stays",
        "other_brokers/lua/include/dedup_lock.lua",
        "(claim.head.lease <= now or",
        "(false or",
    ),
    Mutation(
        "redis",
        "an overdue head stays",
        "other_brokers/lua/include/dedup_lock.lua",
        "now - claim.head.since >= claim.head.timeout",
        "false",
    ),
    Mutation(
        "redis",
        "who waits is evicted",
        "other_brokers/lua/include/dedup_lock.lua",
        "(claim.head.token > 0 and claim.head.timeout > 0",
        "(claim.head.timeout > 0",
    ),
    Mutation(
        "redis",
        "two tokens for a run",
        "other_brokers/lua/include/dedup_lock.lua",
        "if claim.head.token == 0 then",
        "if true then",
    ),
    Mutation(
        "redis",
        "tokens do not rise",
        "other_brokers/lua/include/dedup_lock.lua",
        "call('INCR', KEYS[2])",
        "1",
    ),
    Mutation(
        "redis",
        "an empty key is kept",
        "other_brokers/lua/include/dedup_lock.lua",
        "    call('DEL', KEYS[1])\n",
        "    call('HSET', KEYS[1], 'x', 1)\n",
    ),
    Mutation(
        "redis",
        "a place that is empty is kept",
        "other_brokers/lua/include/dedup_lock.lua",
        "if #gone > 0 then",
        "if false then",
    ),
    Mutation(
        "redis",
        "a key never expires",
        "other_brokers/lua/include/dedup_lock.lua",
        "call('PEXPIREAT'",
        "call('PERSIST', KEYS[1]) local _ = ('PEXPIREAT'",
    ),
    Mutation(
        "redis",
        "a key expires with its first lease",
        "other_brokers/lua/include/dedup_lock.lua",
        "lease = math.max(lease, each.lease)",
        "lease = lease > 0 and math.min(lease, each.lease) or each.lease",
    ),
    Mutation(
        "redis",
        "no owner is woken",
        "other_brokers/lua/include/dedup_lock.lua",
        "call('PUBLISH', channel .. head.owner, KEYS[1])",
        "local _ = 1",
    ),
    Mutation(
        "redis",
        "owners are woken at every step",
        "other_brokers/lua/include/dedup_lock.lua",
        "and not (first and first.id == head.id)",
        "",
    ),
    Mutation(
        "redis",
        "the owner of a replaced call is not woken",
        "other_brokers/lua/enqueue.lua",
        "if replaced then call('PUBLISH'",
        "if false then call('PUBLISH'",
    ),
    Mutation(
        "redis",
        "a call is new each time",
        "other_brokers/lua/enqueue.lua",
        "if known then",
        "if false then",
    ),
    Mutation(
        "redis",
        "a redelivered tail is declined",
        "other_brokers/lua/enqueue.lua",
        "claim.tail.task == task",
        "false",
    ),
    Mutation(
        "redis",
        "a redelivered heir is declined",
        "other_brokers/lua/enqueue.lua",
        "claim.heir.task == task",
        "false",
    ),
    Mutation(
        "redis",
        "a retry replaces the heir",
        "other_brokers/lua/enqueue.lua",
        "head.task == task and not claim.heir",
        "head.task == task",
    ),
    Mutation("redis", "waiting=0 is ignored", "other_brokers/lua/enqueue.lua", "ARGV[8] == '0'", "false"),
    Mutation(
        "redis",
        "a start renews nothing",
        "other_brokers/lua/start.lua",
        "mine.lease = now + tonumber(ARGV[3]) * 1000",
        "",
    ),
    Mutation(
        "redis",
        "a lost run is renewed",
        "other_brokers/lua/heartbeat.lua",
        "(token == 0 or mine.token == token)",
        "true",
    ),
    Mutation(
        "redis",
        "a renewal renews nothing",
        "other_brokers/lua/heartbeat.lua",
        "if alive then mine.lease",
        "if false then mine.lease",
    ),
    Mutation(
        "redis",
        "a freed key stays",
        "other_brokers/lua/free.lua",
        "call('DEL', KEYS[1])",
        "call('HDEL', KEYS[1], 'tail')",
    ),
    Mutation(
        "redis",
        "the token of a lost run is sent as none",
        "other_brokers/redis_coordinator.py",
        "args = (self.keys_of.channel, call, token, ",
        "args = (self.keys_of.channel, call, 0, ",
    ),
)
