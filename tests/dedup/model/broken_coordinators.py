"""The rules of the machine and the coordinators, each broken once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Mutation(NamedTuple):
    """A broken rule: in this file of the package, `new` replaces `old`, whose text is there exactly once."""

    kind: str
    what: str
    file: str
    old: str
    new: str


#: Kind and file -> the broken rule -> the old text and the new one.
Broken = Mapping[tuple[str, str], Mapping[str, tuple[str, str]]]

COORDINATORS: Broken = {
    # The machine itself, which is the oracle: the ledger and the scripts must find these faults.
    ("local", "dedup/machine.py"): {
        "a head that runs covers": ("if not head.started and (", "if ("),
        "two tails": ("if self.tail is not None:\n            return", "if False:\n            return"),
        "no call is promoted": ("self.head, self.tail = self.tail, None", "self.head = None"),
        "the tail before the heir": (
            "self.head, self.heir = self.heir, None",
            "self.head, self.tail = self.tail or self.heir, None",
        ),
        "a stale token ends a run": ("and self.head.token == token > 0", ""),
        "a redelivered tail is declined": ("self.tail.id == again", "False"),
    },
    # The coordinator of threads.
    ("local", "dedup/local.py"): {
        "an overdue head is not evicted": ("if about.timeout is not None:", "if False:"),
        "an idle key is kept": ("            del self._kept[key]\n", "            pass\n"),
        "the time of a run counts from its call": (
            "since = now = self._clock.monotonic()",
            "since = now = kept.calls[call].since",
        ),
        "a retry waits behind the tail": ("continues = (head.id, head.token)", "pass"),
        "renewing does not look at the token": ("and head.token == token)", ")"),
        "tokens begin at 1 for each key": ("token = next(self._tokens)", "token = kept.machine.token + 1"),
    },
    ("redis", "other_brokers/lua/leave.lua"): {
        "a stale token ends a run": ("mine.token == token and", "(token > 0) == (mine.token > 0) and"),
        "a run can be withdrawn": (
            "mine.token == token and (how == 'withdraw') == (token == 0)",
            "(how == 'withdraw' or mine.token == token)",
        ),
        "a finish promotes no call": (
            "if place == 'head' then promote() else",
            "if place == 'head' then dedup_lock.head = nil else",
        ),
        "a finish promotes twice": ("then promote() else", "then promote() promote() else"),
        "a release keeps the token": ("mine.token, mine.since = 0, 0", "mine.since = 0"),
    },
    ("redis", "other_brokers/lua/include/dedup_lock.lua"): {
        "the time of a run begins early": (
            "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now",
            "claim.head.token, claim.head.since = call('INCR', KEYS[2]), now - 5000000",
        ),
        "a dead tail stays": (
            "for _, place in ipairs({'heir', 'tail'}) do\n  if",
            "for _, place in ipairs({'heir'}) do\n  if",
        ),
        "a dead heir stays": (
            "for _, place in ipairs({'heir', 'tail'}) do\n  if",
            "for _, place in ipairs({'tail'}) do\n  if",
        ),
        "a dead head stays": ("(claim.head.lease <= now or", "(false or"),
        "an overdue head stays": ("now - claim.head.since >= claim.head.timeout", "false"),
        "who waits is evicted": (
            "(claim.head.token > 0 and claim.head.timeout > 0",
            "(claim.head.timeout > 0",
        ),
        "two tokens for a run": ("if claim.head.token == 0 then", "if true then"),
        "tokens do not rise": ("call('INCR', KEYS[2])", "1"),
        "an empty key is kept": ("    call('DEL', KEYS[1])\n", "    call('HSET', KEYS[1], 'x', 1)\n"),
        "a place that is empty is kept": ("if #gone > 0 then", "if false then"),
        "a key never expires": ("call('PEXPIREAT'", "call('PERSIST', KEYS[1]) local _ = ('PEXPIREAT'"),
        "a key expires with its first lease": (
            "lease = math.max(lease, each.lease)",
            "lease = lease > 0 and math.min(lease, each.lease) or each.lease",
        ),
        "no owner is woken": ("call('PUBLISH', channel .. head.owner, KEYS[1])", "local _ = 1"),
        "owners are woken at every step": ("and not (first and first.id == head.id)", ""),
    },
    ("redis", "other_brokers/lua/enqueue.lua"): {
        "the owner of a replaced call is not woken": (
            "if replaced then call('PUBLISH'",
            "if false then call('PUBLISH'",
        ),
        "a call is new each time": ("if known then", "if false then"),
        "a redelivered tail is declined": ("claim.tail.task == task", "false"),
        "a redelivered heir is declined": ("claim.heir.task == task", "false"),
        "a retry replaces the heir": ("head.task == task and not claim.heir", "head.task == task"),
        "waiting=0 is ignored": ("ARGV[8] == '0'", "false"),
    },
    ("redis", "other_brokers/lua/start.lua"): {
        "a start renews nothing": ("mine.lease = now + tonumber(ARGV[3]) * 1000", ""),
    },
    ("redis", "other_brokers/lua/heartbeat.lua"): {
        "a lost run is renewed": ("(token == 0 or mine.token == token)", "true"),
        "a renewal renews nothing": ("if alive then mine.lease", "if false then mine.lease"),
    },
    ("redis", "other_brokers/lua/free.lua"): {
        "a freed key stays": ("call('DEL', KEYS[1])", "call('HDEL', KEYS[1], 'tail')"),
    },
    ("redis", "other_brokers/redis_coordinator.py"): {
        "the token of a lost run is sent as none": (
            "args = (self.keys_of.channel, call, token, ",
            "args = (self.keys_of.channel, call, 0, ",
        ),
    },
}
