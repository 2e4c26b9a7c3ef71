"""The rules of the scripts of the tenant broker, each broken once."""

from __future__ import annotations

from tests.dedup.model.broken_coordinators import Broken

BROKER: Broken = {
    ("broker", "transport/redis/lua/include/tags.lua"): {
        "a stale tag is good": ("struct.unpack('>d', entry) == tonumber(", "tonumber("),
    },
    ("broker", "transport/redis/lua/include/finish.lua"): {
        "a finish keeps the claim": ("if flags >= KEYED then", "if false then"),
    },
    ("broker", "transport/redis/lua/include/settle.lua"): {
        "a settled message keeps no key": (
            "string.char(flags + SETTLED)",
            "string.char(flags % KEYED + SETTLED)",
        ),
    },
    ("broker", "transport/redis/lua/include/dedup.lua"): {
        "no call is promoted": (
            "c.head, c.follow.head, c.tail, c.follow.tail = c.tail, c.follow.tail, nil, false",
            "c.head = nil",
        ),
        "the tail before the heir": (
            "    if c.heir then\n      c.head, ",
            "    if c.heir and not c.tail then\n      c.head, ",
        ),
        "a promoted message stays blocked": ("if c.head then unblock(c.head) end", ""),
        "a delayed one starts at once": (
            "if due > now then\n        call('ZADD', P .. 'delayed'",
            "if false then\n        call('ZADD', P .. 'delayed'",
        ),
        "a promoted one runs already": (
            "c.since, c.number, c.timeout = 0, 0, 0\n    write_lock(scope, c)\n    if c.head",
            "c.timeout = 0\n    write_lock(scope, c)\n    if c.head",
        ),
        "an evicted head leaves for the one that runs": (
            "local place = c and (c.head == id and 'head' or",
            "local place = c and (",
        ),
        "any end promotes": ("    if place == 'head' then\n      if over", "    if c then\n      if over"),
        "a member is not forgotten": ("if scope then call('HDEL', P .. 'dedup_members', id) end", ""),
        "any continuation is the heir": (
            "d.continues == c.head and d.number == c.number",
            "d.continues ~= ''",
        ),
        "a stale continuation is the heir": (" and d.number == c.number", ""),
        "a second heir": ("c.number > 0 and not c.heir and d.continues", "c.number > 0 and d.continues"),
        "two tails": (
            "    elseif c.tail then\n      if d.replace",
            "    elseif false then\n      if d.replace",
        ),
        "a head that runs covers": ("elseif c.number == 0 and not (", "elseif not ("),
        "waiting=0 is ignored": ("elseif not d.waiting then", "elseif false then"),
        "a replaced message still waits": ("if replaced then displace(replaced, id) end", ""),
        "who is replaced stays in line": ("call('ZREM', P .. 'tenant:' .. tenant, id)", "local _ = 1"),
        "followers of the replaced are lost": (
            "    move_followers(id, by)\n    call('HDEL'",
            "    call('HDEL'",
        ),
        "followers get no result": ("if over and followed then settle_followers(id) end", ""),
        "followers do not follow the heir": ("if over then pass_lock_on(c) end", ""),
        "followers do not follow the heir of the evicted": (
            "    pass_lock_on(c)\n    promote_lock",
            "    promote_lock",
        ),
        "followers of a late declined call are lost": ("if handed_on then move_followers(id, ahead) end", ""),
        "a follower's mark is not set": ("if (handed_on or verdict == 'follow') and", "if false and"),
        "a cancelled follower gets a result": (
            (
                "    call('HDEL', P .. 'following', id)\n"
                "    call('LREM', P .. 'followers:' .. covering, 1, id)\n"
            ),
            "",
        ),
        "a timeout is forgotten": (
            "if c.timeout > 0 and c.number > 0 and (c.heir or c.tail) then",
            "if false then",
        ),
        "a lone head is evicted": (
            "if c.timeout > 0 and not (c.heir or c.tail) then call('ZREM'",
            "if false then call('ZREM'",
        ),
        "an eviction comes early": (
            "local deadline = c.since + c.timeout",
            "local deadline = c.since + c.timeout / 2 c.timeout = c.timeout / 2 write_lock(scope, c)",
        ),
        "an eviction is not counted": ("call('HINCRBY', P .. 'verdicts', 'evict', 1)", "local _ = 1"),
        "the evicted head keeps its claim": (
            "    call('HDEL', P .. 'dedup_members', head)\n    pass_lock_on",
            "    pass_lock_on",
        ),
        "who comes back evicted takes its old place": (
            "local verdict = admit(message, scope_of(entry.owner, d.key))\n",
            "local verdict = 'accept'\n",
        ),
        "a head that comes back runs on": (
            "c.since, c.number, c.timeout = 0, 0, 0\n      write_lock(scope, c)\n      return",
            "c.timeout = 0\n      write_lock(scope, c)\n      return",
        ),
    },
    ("broker", "transport/redis/lua/claim.lua"): {
        "a claim starts nothing": (
            "if #delivery.started > 0 then dq.fast_dedup().start",
            "if false then dq.fast_dedup().start",
        ),
        "an expired head keeps its key": (
            "for i = 1, #serving.discarded do dq.dedup().leave",
            "for i = 1, 0 do dq.dedup().leave",
        ),
    },
    # A message that is alone with its key takes a shorter path.
    ("broker", "transport/redis/lua/include/dedup_fast_path.lua"): {
        "a lone message claims nothing": ("call('HSET', P .. 'dedup_members', id, scope)", ""),
        "a mate in the push is taken as removed": ("    admitted[id] = message\n", ""),
        "a start forgets the waiting calls": (
            "if claims[i] and string.sub(claims[i], 25) == ending then",
            "if claims[i] then",
        ),
        "who starts alone has no timeout": (
            "scope_of(messages[i].tenant, section.key), section.timeout",
            "scope_of(messages[i].tenant, section.key), 0",
        ),
        "a finish forgets the waiting calls": (
            "if claims[i] and string.sub(claims[i], 25) == alone(ids[i]) then",
            "if claims[i] then",
        ),
        "a call that ends alone stays a member": ("write('HDEL', P .. 'dedup_members', members)", ""),
        "a lone message keeps the claim at its end": ("write('HDEL', P .. 'dedup_locks', ended)", ""),
    },
    ("broker", "transport/redis/lua/include/release.lua"): {
        "a dead head keeps its key": (
            "for i = 1, #leaving do dq.dedup().leave",
            "for i = 1, 0 do dq.dedup().leave",
        ),
        "a settled one comes back": ("if entry.settled or not record or", "if not record or"),
    },
    ("broker", "transport/redis/lua/include/promote.lua"): {
        "overdue heads are not looked for": (
            "state.evict > 0 and state.evict <= now and dq.dedup().evict_overdue(limit) or 0",
            "0",
        ),
    },
    ("broker", "transport/redis/lua/push.lua"): {
        "a resent push counts again": (
            "if producer ~= '' and sequence <= last and not was_full[sequence] then",
            "if false then",
        ),
        "a declined one is kept": ("if not messages[i].dropped then", "if true then"),
        "a follower waits for a worker, too": (
            "message.following = verdict == 'follow'",
            "message.following = false",
        ),
    },
    ("broker", "transport/redis/lua/include/accept.lua"): {
        "a blocked one waits for a worker, too": ("elseif message.blocked then", "elseif false then"),
    },
    ("broker", "transport/redis/lua/cancel.lua"): {
        "a blocked one cannot be cancelled": ("call('ZREM', P .. 'blocked', id) == 1 or ", ""),
    },
}
