"""The rules of the scripts of the tenant broker, each broken once."""

from __future__ import annotations

from tests.dedup.model.broken_coordinators import Mutation

DEDUP, KEYED, HELD, GIVE_BACK, PUSH, ACCEPT = (
    f"transport/redis/{name}.lua"
    for name in (
        "include/dedup",
        "include/keyed",
        "include/held",
        "include/give_back",
        "push",
        "include/accept",
    )
)
CLAIMS, PROMOTE, CANCEL = (f"transport/redis/{name}.lua" for name in ("claim", "include/promote", "cancel"))


BROKER = (
    Mutation("broker", "a stale tag is good", HELD, "entry.claim == tonumber(", "tonumber("),
    Mutation("broker", "a finish keeps the claim", HELD, "if #claimants > 0 then", "if false then"),
    Mutation("broker", "a settled message keeps no key", HELD, "+ (entry.keyed and KEYED or 0)", ""),
    Mutation(
        "broker",
        "nobody is promoted",
        DEDUP,
        "c.head, c.follow.head, c.tail, c.follow.tail = c.tail, c.follow.tail, nil, false",
        "c.head = nil",
    ),
    Mutation(
        "broker",
        "the tail before the heir",
        DEDUP,
        "    if c.heir then\n      c.head, ",
        "    if c.heir and not c.tail then\n      c.head, ",
    ),
    Mutation("broker", "who is promoted stays blocked", DEDUP, "if c.head then unblock(c.head) end", ""),
    Mutation(
        "broker",
        "a delayed one starts at once",
        DEDUP,
        "if due > now then\n        call('ZADD', P .. 'delayed'",
        "if false then\n        call('ZADD', P .. 'delayed'",
    ),
    Mutation(
        "broker",
        "a promoted one runs already",
        DEDUP,
        "c.since, c.number, c.timeout = 0, 0, 0\n    write_claim(scope, c)\n    if c.head",
        "c.timeout = 0\n    write_claim(scope, c)\n    if c.head",
    ),
    Mutation(
        "broker",
        "an evicted head leaves for the one that runs",
        DEDUP,
        "local place = c and (c.head == id and 'head' or",
        "local place = c and (",
    ),
    Mutation(
        "broker",
        "whoever ends promotes",
        DEDUP,
        "    if place == 'head' then\n      if over",
        "    if c then\n      if over",
    ),
    Mutation(
        "broker",
        "a claimant is not forgotten",
        DEDUP,
        "if scope then call('HDEL', P .. 'claimants', id) end",
        "",
    ),
    Mutation(
        "broker",
        "any continuation is the heir",
        DEDUP,
        "d.continues == c.head and d.number == c.number",
        "d.continues ~= ''",
    ),
    Mutation("broker", "a stale continuation is the heir", DEDUP, " and d.number == c.number", ""),
    Mutation(
        "broker",
        "a second heir",
        DEDUP,
        "c.number > 0 and not c.heir and d.continues",
        "c.number > 0 and d.continues",
    ),
    Mutation(
        "broker",
        "two tails",
        DEDUP,
        "    elseif c.tail then\n      if d.replace",
        "    elseif false then\n      if d.replace",
    ),
    Mutation("broker", "a head that runs covers", DEDUP, "elseif c.number == 0 and not (", "elseif not ("),
    Mutation("broker", "nobody waits: ignored", DEDUP, "elseif not d.waiting then", "elseif false then"),
    Mutation("broker", "who is replaced waits on", DEDUP, "if replaced then displace(replaced, id) end", ""),
    Mutation(
        "broker",
        "who is replaced stays in line",
        DEDUP,
        "call('ZREM', P .. 'tenant:' .. tenant, id)",
        "local _ = 1",
    ),
    Mutation(
        "broker",
        "followers of the replaced are lost",
        DEDUP,
        "    move_followers(id, by)\n    call('HDEL'",
        "    call('HDEL'",
    ),
    Mutation(
        "broker", "followers are not told", DEDUP, "if over and followed then settle_followers(id) end", ""
    ),
    Mutation("broker", "followers do not follow the heir", DEDUP, "if over then hand_on(c) end", ""),
    Mutation(
        "broker",
        "followers do not follow the heir of the evicted",
        DEDUP,
        "    hand_on(c)\n    promote_claim",
        "    promote_claim",
    ),
    Mutation(
        "broker",
        "followers of who is declined late are lost",
        DEDUP,
        "if handed_on then move_followers(id, ahead) end",
        "",
    ),
    Mutation(
        "broker",
        "a follower's mark is not set",
        DEDUP,
        "if (handed_on or verdict == 'follow') and",
        "if false and",
    ),
    Mutation(
        "broker",
        "a cancelled follower is told",
        DEDUP,
        "    call('HDEL', P .. 'following', id)\n    call('LREM', P .. 'followers:' .. covering, 1, id)\n",
        "",
    ),
    Mutation(
        "broker",
        "a timeout is forgotten",
        DEDUP,
        "if c.timeout > 0 and c.number > 0 and (c.heir or c.tail) then",
        "if false then",
    ),
    Mutation(
        "broker",
        "a lone head is evicted",
        DEDUP,
        "if c.timeout > 0 and not (c.heir or c.tail) then call('ZREM'",
        "if false then call('ZREM'",
    ),
    Mutation(
        "broker",
        "an eviction comes early",
        DEDUP,
        "local deadline = c.since + c.timeout",
        "local deadline = c.since + c.timeout / 2 c.timeout = c.timeout / 2 write_claim(scope, c)",
    ),
    Mutation(
        "broker",
        "an eviction is not counted",
        DEDUP,
        "call('HINCRBY', P .. 'verdicts', 'evict', 1)",
        "local _ = 1",
    ),
    Mutation(
        "broker",
        "the evicted head keeps its claim",
        DEDUP,
        "    call('HDEL', P .. 'claimants', head)\n    hand_on",
        "    hand_on",
    ),
    Mutation(
        "broker",
        "who comes back evicted takes its old place",
        DEDUP,
        "local verdict = admit(message, scope_of(entry.tenant, d.key))\n",
        "local verdict = 'accept'\n",
    ),
    Mutation(
        "broker",
        "a head that comes back runs on",
        DEDUP,
        "c.since, c.number, c.timeout = 0, 0, 0\n      write_claim(scope, c)\n      return",
        "c.timeout = 0\n      write_claim(scope, c)\n      return",
    ),
    Mutation(
        "broker",
        "a claim starts nothing",
        CLAIMS,
        "if #started > 0 then keyed().start",
        "if false then keyed().start",
    ),
    # Who is alone with a key goes a shorter way.
    Mutation("broker", "who is alone claims nothing", KEYED, "call('HSET', P .. 'claimants', id, scope)", ""),
    Mutation("broker", "a mate in the push is taken as removed", KEYED, "    admitted[id] = message\n", ""),
    Mutation(
        "broker",
        "a start forgets who waits",
        KEYED,
        "if claims[i] and string.sub(claims[i], 25) == ending then",
        "if claims[i] then",
    ),
    Mutation(
        "broker",
        "who starts alone has no timeout",
        KEYED,
        "scope_of(messages[i].tenant, section.key), section.timeout",
        "scope_of(messages[i].tenant, section.key), 0",
    ),
    Mutation(
        "broker",
        "a finish forgets who waits",
        KEYED,
        "if claims[i] and string.sub(claims[i], 25) == alone(ids[i]) then",
        "if claims[i] then",
    ),
    Mutation(
        "broker", "who ends alone stays a claimant", KEYED, "write('HDEL', P .. 'claimants', claimants)", ""
    ),
    Mutation("broker", "who ends alone keeps the claim", KEYED, "write('HDEL', P .. 'claims', ended)", ""),
    Mutation(
        "broker",
        "an expired head keeps its key",
        CLAIMS,
        "for i = 1, #leaving do dedup().leave",
        "for i = 1, 0 do dedup().leave",
    ),
    Mutation(
        "broker",
        "a dead head keeps its key",
        GIVE_BACK,
        "for i = 1, #leaving do dedup().leave",
        "for i = 1, 0 do dedup().leave",
    ),
    Mutation(
        "broker",
        "a settled one comes back",
        GIVE_BACK,
        "if entry.settled or not record or",
        "if not record or",
    ),
    Mutation(
        "broker",
        "overdue heads are not looked for",
        PROMOTE,
        "state.evict > 0 and state.evict <= now and dedup().evict_overdue(limit) or 0",
        "0",
    ),
    Mutation(
        "broker",
        "a resent push counts again",
        PUSH,
        "if producer ~= '' and sequence <= last then",
        "if false then",
    ),
    Mutation("broker", "a declined one is kept", PUSH, "if not messages[i].dropped then", "if true then"),
    Mutation(
        "broker",
        "a follower waits for a worker, too",
        PUSH,
        "message.following = verdict == 'follow'",
        "message.following = false",
    ),
    Mutation(
        "broker",
        "a blocked one waits for a worker, too",
        ACCEPT,
        "elseif message.blocked then",
        "elseif false then",
    ),
    Mutation(
        "broker", "a blocked one cannot be cancelled", CANCEL, "call('ZREM', P .. 'blocked', id) == 1 or ", ""
    ),
)
