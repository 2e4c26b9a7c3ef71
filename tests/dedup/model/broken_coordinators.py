"""The rules of the machine and the coordinators, each broken once."""

from __future__ import annotations

from typing import NamedTuple

MACHINE, LOCAL, REDIS = "dedup/machine.py", "dedup/local.py", "dedup/redis.py"
CLAIM, ENQUEUE, LEAVE, START = (
    f"dedup/lua/{name}.lua" for name in ("include/claim", "enqueue", "leave", "start")
)
RENEW, FREE = "dedup/lua/renew.lua", "dedup/lua/free.lua"


class Mutation(NamedTuple):
    """A rule broken: in this file of the package, the one place with this text reads otherwise."""

    kind: str
    what: str
    file: str
    old: str
    new: str


COORDINATORS = (
    # The machine itself, which is the oracle: the ledger and the scripts must object.
    Mutation("local", "a head that runs covers", MACHINE, "if not head.started and (", "if ("),
    Mutation(
        "local",
        "two tails",
        MACHINE,
        "if self.tail is not None:\n            return",
        "if False:\n            return",
    ),
    Mutation(
        "local", "nobody is promoted", MACHINE, "self.head, self.tail = self.tail, None", "self.head = None"
    ),
    Mutation(
        "local",
        "the tail before the heir",
        MACHINE,
        "self.head, self.heir = self.heir, None",
        "self.head, self.tail = self.tail or self.heir, None",
    ),
    Mutation("local", "a stale token ends a run", MACHINE, "and self.head.token == token > 0", ""),
    Mutation("local", "a redelivered tail is declined", MACHINE, "self.tail.id == again", "False"),
    # The coordinator of threads.
    Mutation("local", "an overdue head is not evicted", LOCAL, "if about.timeout is not None:", "if False:"),
    Mutation(
        "local", "an idle key is kept", LOCAL, "            del self._kept[key]\n", "            pass\n"
    ),
    Mutation(
        "local",
        "the time of a run counts from its call",
        LOCAL,
        "since = now = self._clock.monotonic()",
        "since = now = kept.calls[call].since",
    ),
    Mutation("local", "a retry waits behind the tail", LOCAL, "continues = (head.id, head.token)", "pass"),
    Mutation("local", "renewing does not look at the token", LOCAL, "and head.token == token)", ")"),
    Mutation(
        "local",
        "tokens start anew with a key",
        LOCAL,
        "token = next(self._tokens)",
        "token = kept.machine.token + 1",
    ),
    # The coordinator in Redis.
    Mutation(
        "redis",
        "a stale token ends a run",
        LEAVE,
        "mine.token == token and",
        "(token > 0) == (mine.token > 0) and",
    ),
    Mutation(
        "redis",
        "a run can be withdrawn",
        LEAVE,
        "mine.token == token and (how == 'withdraw') == (token == 0)",
        "(how == 'withdraw' or mine.token == token)",
    ),
    Mutation(
        "redis",
        "a finish promotes nobody",
        LEAVE,
        "if place == 'head' then promote() else",
        "if place == 'head' then claim.head = nil else",
    ),
    Mutation(
        "redis", "a finish promotes twice", LEAVE, "then promote() else", "then promote() promote() else"
    ),
    Mutation("redis", "a release keeps the token", LEAVE, "mine.token, mine.since = 0, 0", "mine.since = 0"),
    Mutation(
        "redis",
        "the time of a run begins early",
        CLAIM,
        "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now",
        "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now - 5000000",
    ),
    Mutation(
        "redis",
        "a dead tail stays",
        CLAIM,
        "for _, place in ipairs({'heir', 'tail'}) do\n  if",
        "for _, place in ipairs({'heir'}) do\n  if",
    ),
    Mutation(
        "redis",
        "a dead heir stays",
        CLAIM,
        "for _, place in ipairs({'heir', 'tail'}) do\n  if",
        "for _, place in ipairs({'tail'}) do\n  if",
    ),
    Mutation("redis", "a dead head stays", CLAIM, "(claim.head.lease <= now or", "(false or"),
    Mutation(
        "redis", "an overdue head stays", CLAIM, "now - claim.head.since >= claim.head.timeout", "false"
    ),
    Mutation(
        "redis",
        "who waits is evicted",
        CLAIM,
        "(claim.head.token > 0 and claim.head.timeout > 0",
        "(claim.head.timeout > 0",
    ),
    Mutation("redis", "two tokens for a run", CLAIM, "if claim.head.token == 0 then", "if true then"),
    Mutation("redis", "tokens do not rise", CLAIM, "call('INCR', KEYS[2])", "1"),
    Mutation(
        "redis",
        "an empty key is kept",
        CLAIM,
        "    call('DEL', KEYS[1])\n",
        "    call('HSET', KEYS[1], 'x', 1)\n",
    ),
    Mutation("redis", "a place that is empty is kept", CLAIM, "if #gone > 0 then", "if false then"),
    Mutation(
        "redis",
        "a key never expires",
        CLAIM,
        "call('PEXPIREAT'",
        "call('PERSIST', KEYS[1]) local _ = ('PEXPIREAT'",
    ),
    Mutation(
        "redis",
        "a key expires with its first lease",
        CLAIM,
        "lease = math.max(lease, each.lease)",
        "lease = lease > 0 and math.min(lease, each.lease) or each.lease",
    ),
    Mutation(
        "redis", "nobody is told", CLAIM, "call('PUBLISH', channel .. head.owner, KEYS[1])", "local _ = 1"
    ),
    Mutation("redis", "all are told at every step", CLAIM, "and not (first and first.id == head.id)", ""),
    Mutation(
        "redis",
        "who is replaced is not told",
        ENQUEUE,
        "if replaced then call('PUBLISH'",
        "if false then call('PUBLISH'",
    ),
    Mutation("redis", "a call is new each time", ENQUEUE, "if known then", "if false then"),
    Mutation("redis", "a redelivered tail is declined", ENQUEUE, "claim.tail.task == task", "false"),
    Mutation("redis", "a redelivered heir is declined", ENQUEUE, "claim.heir.task == task", "false"),
    Mutation(
        "redis",
        "a retry replaces the heir",
        ENQUEUE,
        "head.task == task and not claim.heir",
        "head.task == task",
    ),
    Mutation("redis", "nobody waits: ignored", ENQUEUE, "ARGV[8] == '0'", "false"),
    Mutation("redis", "a start renews nothing", START, "mine.lease = now + tonumber(ARGV[3]) * 1000", ""),
    Mutation("redis", "a lost run is renewed", RENEW, "(token == 0 or mine.token == token)", "true"),
    Mutation(
        "redis", "a renewal renews nothing", RENEW, "if alive then mine.lease", "if false then mine.lease"
    ),
    Mutation("redis", "a freed key stays", FREE, "call('DEL', KEYS[1])", "call('HDEL', KEYS[1], 'tail')"),
    Mutation(
        "redis",
        "the token of a lost run is sent as none",
        REDIS,
        "args = (self.keys_of.channel, call, token, ",
        "args = (self.keys_of.channel, call, 0, ",
    ),
)
