--@include keyed
-- Dedup: at most one message of a key runs and at most one waits, as the machine of celery_dq/dedup/machine.py says.
-- A claim lives as long as its message: whatever ends or returns a message calls in here. Only records with a key
-- get here; for all others nothing is read and nothing written.
--
-- `claims` holds per scope (tenant and key) the head, its heir (a retry of it) and the tail, `claimants` the scope of
-- each of these. Heir and tail lie in `blocked` until they are promoted. A declined message that somebody waits for
-- is a follower: it lies in `followers:<covering>`, and becomes a discard when the covering one is done with.
local function make_dedup()
  local MAX_FOLLOWERS = 1000
  local section_of, scope_of, admitted = keyed().section_of, keyed().scope_of, keyed().admitted

  -- The same section with its flags by name.
  local function with_flags(section)
    local flags = section.flags
    section.replace, section.waiting = flags % 2 == 1, flags % 4 >= 2
    section.follow, section.awaited = flags % 8 >= 4, flags % 16 >= 8
    return section
  end

  -- since (µs, 0 until it is claimed), claim number, timeout (µs), which of the three have followers
  local function read_claim(scope)
    local packed = call('HGET', P .. 'claims', scope)
    if not packed then return nil end
    local since, number, timeout, marks, head, heir, tail = struct.unpack('>dddBHHH', packed)
    local function id_at(from, size)
      if size > 0 then return string.sub(packed, from, from + size - 1) end
    end
    return {since = since, number = number, timeout = timeout, head = id_at(32, head), heir = id_at(32 + head, heir),
      tail = id_at(32 + head + heir, tail), follow = {head = marks % 2 == 1, heir = math.floor(marks / 2) % 2 == 1,
      tail = marks >= 4}}
  end

  local function write_claim(scope, c)
    if not c.head then
      call('HDEL', P .. 'claims', scope)
      return
    end
    local heir, tail, follow = c.heir or '', c.tail or '', c.follow
    call('HSET', P .. 'claims', scope, struct.pack('>dddBHHH', c.since, c.number, c.timeout,
      (follow.head and 1 or 0) + (follow.heir and 2 or 0) + (follow.tail and 4 or 0), #c.head, #heir, #tail)
      .. c.head .. heir .. tail)
  end

  -- A head that runs and has somebody behind it may be evicted in time.
  local function watch(scope, c)
    if c.timeout > 0 and c.number > 0 and (c.heir or c.tail) then
      local deadline = c.since + c.timeout
      call('ZADD', P .. 'evictions', deadline, scope)
      if state.evict == 0 or deadline < state.evict then state.evict = deadline end
    end
  end

  -- Lets a message go that was blocked: to where it would have waited.
  local function unblock(id)
    local score, record = call('ZSCORE', P .. 'blocked', id), call('HGET', P .. 'messages', id)
    local priority, due, _, length = header(record)
    if score and priority then
      if due > now then
        call('ZADD', P .. 'delayed', due, id)
      else
        local tenant = tenant_name(record, length)
        add_waiting({tenant}, {[tenant] = {tonumber(score), id}})
      end
    end
    call('ZREM', P .. 'blocked', id)
  end

  -- The head is gone: the heir, else the tail, takes its place.
  local function promote_claim(scope, c)
    if c.timeout > 0 and (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
    if c.heir then
      c.head, c.follow.head, c.heir, c.follow.heir = c.heir, c.follow.heir, nil, false
    else
      c.head, c.follow.head, c.tail, c.follow.tail = c.tail, c.follow.tail, nil, false
    end
    c.since, c.number, c.timeout = 0, 0, 0
    write_claim(scope, c)
    if c.head then unblock(c.head) end
  end

  local function follow(id, covering)
    call('HSET', P .. 'following', id, covering)
    call('RPUSH', P .. 'followers:' .. covering, id)
  end

  -- Nobody waits for this message's result any more. Returns whether somebody did.
  local function unfollow(id)
    local covering = call('HGET', P .. 'following', id)
    if not covering then return false end
    call('HDEL', P .. 'following', id)
    call('LREM', P .. 'followers:' .. covering, 1, id)
    return true
  end

  -- All of them: nobody comes back for a rest. More than MAX_FOLLOWERS they are only where evicted runs came back.
  local function move_followers(from, to)
    for _ = 1, call('LLEN', P .. 'followers:' .. from) do
      call('HSET', P .. 'following', call('RPOPLPUSH', P .. 'followers:' .. from, P .. 'followers:' .. to), to)
    end
  end

  -- Whether one more may follow. Who follows a head and who its heir will wait for the same.
  local function has_room(c, place)
    local count = call('LLEN', P .. 'followers:' .. c[place])
    if place == 'heir' then count = count + call('LLEN', P .. 'followers:' .. c.head) end
    return count < MAX_FOLLOWERS
  end

  local function record_of(id)
    return admitted[id] and admitted[id].record or call('HGET', P .. 'messages', id)
  end

  -- Whether this one would become a follower of who takes its place, and too many follow already.
  local function may_not_follow(id)
    if call('LLEN', P .. 'followers:' .. id) < MAX_FOLLOWERS then return false end
    local record = record_of(id)
    return record and is_keyed(record) and with_flags(section_of(record)).awaited
  end

  -- The heir goes on with what the head began: its result is what they wait for.
  local function hand_on(c)
    if c.follow.head and c.heir then
      move_followers(c.head, c.heir)
      c.follow.heir = true
    end
  end

  -- Those who waited for this message's result get theirs.
  local function settle_followers(id)
    local found = call('LRANGE', P .. 'followers:' .. id, 0, -1)
    if #found == 0 then return end
    local discards, reasons = {}, {}
    for i = 1, #found do
      if call('HDEL', P .. 'following', found[i]) == 1 and call('HEXISTS', P .. 'messages', found[i]) == 1 then
        discards[#discards + 1] = next_seq()
        discards[#discards + 1] = found[i]
        reasons[#reasons + 1] = found[i]
        reasons[#reasons + 1] = 'covered:' .. id
      end
    end
    write('HSET', P .. 'reasons', reasons)
    write('ZADD', P .. 'discards', discards)
    call('DEL', P .. 'followers:' .. id)
  end

  -- A message with a key runs no more, or will not. `over`: it is done with, else it is still to be discarded.
  local function leave(id, over)
    local scope = call('HGET', P .. 'claimants', id)
    local c = scope and read_claim(scope)
    if scope then call('HDEL', P .. 'claimants', id) end
    local place = c and (c.head == id and 'head' or c.heir == id and 'heir' or c.tail == id and 'tail')
    local followed = not place or c.follow[place]
    if place == 'head' then
      if over then hand_on(c) end
      promote_claim(scope, c)
    elseif place then
      c[place], c.follow[place] = nil, false
      if c.timeout > 0 and not (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
      write_claim(scope, c)
      call('ZREM', P .. 'blocked', id)
    end
    if over and followed then settle_followers(id) end
  end

  -- Takes the message out of where it waits: a later one has its place.
  local function displace(id, by)
    local mate = admitted[id]
    local record = record_of(id)
    local priority, _, _, length = header(record)
    move_followers(id, by)
    call('HDEL', P .. 'claimants', id)
    call('ZREM', P .. 'blocked', id)
    call('ZREM', P .. 'delayed', id)
    if not priority then return end
    if not mate then
      local tenant = tenant_name(record, length)
      unfold({tenant})
      call('ZREM', P .. 'tenant:' .. tenant, id)
      replace({tenant})
    end
    local d = is_keyed(record) and with_flags(section_of(record))
    if mate then mate.blocked, mate.following, mate.dropped = false, d.awaited, not d.awaited end
    if d and d.awaited then
      follow(id, by)
    else
      call('HDEL', P .. 'messages', id)
      call('HDEL', P .. 'deliveries', id)
    end
  end

  -- As above, where somebody has had the key.
  local function admit(message, scope)
    local id, d = message.id, with_flags(message.section)
    local c = read_claim(scope)
    while c and c.head and not admitted[c.head] and call('HEXISTS', P .. 'messages', c.head) == 0 do
      -- Its message was removed behind our back.
      call('HDEL', P .. 'claimants', c.head)
      promote_claim(scope, c)
    end
    local verdict, ahead, place, replaced, covering
    if not (c and c.head) then
      c = {since = 0, number = 0, timeout = 0, head = id, follow = {}}
      verdict, ahead, place = 'accept', id, 'head'
    elseif c.number > 0 and not c.heir and d.continues == c.head and d.number == c.number then
      verdict, ahead, place, c.heir = 'accept', c.head, 'heir', id
    elseif c.number == 0 and not (d.replace and (c.heir or c.tail)) then
      if d.replace then
        verdict, ahead, place, replaced, c.head = 'accept', id, 'head', c.head, id
      else
        covering = 'head'
      end
    elseif c.tail then
      if d.replace then
        verdict, ahead, place, replaced, c.tail = 'block', c.head, 'tail', c.tail, id
      else
        covering = 'tail'
      end
    elseif c.heir and not d.replace then
      covering = 'heir'
    elseif not d.waiting then
      covering = 'head'
    else
      verdict, ahead, place, c.tail = 'block', c.head, 'tail', id
    end
    if replaced and may_not_follow(replaced) then
      verdict, ahead, replaced = 'refuse', replaced, nil
    elseif covering then
      verdict, ahead = 'decline', c[covering]
      if d.follow then
        verdict = has_room(c, covering) and 'follow' or 'refuse'
        if verdict == 'follow' then follow(id, ahead) end
      end
      local handed_on = message.returned and verdict ~= 'follow' and call('EXISTS', P .. 'followers:' .. id) == 1
      if handed_on then move_followers(id, ahead) end
      if (handed_on or verdict == 'follow') and not c.follow[covering] then
        c.follow[covering] = true
        write_claim(scope, c)
      end
    else
      admitted[id] = message
      message.blocked = place ~= 'head'
      call('HSET', P .. 'claimants', id, scope)
      if replaced then displace(replaced, id) end
      if replaced or message.returned then
        c.follow[place] = call('EXISTS', P .. 'followers:' .. id) == 1
      end
      write_claim(scope, c)
      if message.blocked then watch(scope, c) end
    end
    call('HINCRBY', P .. 'verdicts', verdict, 1)
    if replaced then call('HINCRBY', P .. 'verdicts', 'replace', 1) end
    return verdict, ahead, replaced
  end

  -- This message was claimed just now, under this number.
  local function start(id, scope, timeout, number)
    local c = read_claim(scope)
    if c and c.head == id then
      c.since, c.number, c.timeout = now, number, timeout
      write_claim(scope, c)
      watch(scope, c)
    end
  end

  -- A claimed message goes back to where it waited. Returns 'wait', 'aside' (it must wait for another one) or 'gone':
  -- it was evicted meanwhile, and another one covers it.
  local function come_back(entry, record)
    local scope = call('HGET', P .. 'claimants', entry.id)
    local c = scope and read_claim(scope)
    if c and c.head == entry.id then
      if c.timeout > 0 and (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
      c.since, c.number, c.timeout = 0, 0, 0
      write_claim(scope, c)
      return 'wait'
    end
    local d = section_of(record)
    -- It may wait, is kept when somebody awaits it, and takes nobody's place.
    d.flags, d.continues = d.flags % 16 >= 8 and 14 or 2, ''
    local message = {id = entry.id, tenant = entry.tenant, section = d, returned = true}
    local verdict = admit(message, scope_of(entry.tenant, d.key))
    if verdict == 'accept' then return 'wait' end
    if verdict == 'block' then
      call('ZADD', P .. 'blocked', entry.score, entry.id)
      return 'aside'
    end
    return verdict == 'follow' and 'aside' or 'gone'
  end

  -- Takes the key from its head, whose token is void from now on. Workers that run it are told.
  local function evict(scope)
    local c = read_claim(scope)
    if not c then return nil end
    local head = c.head
    if c.number > 0 then
      call('PUBLISH', P .. 'evicted', string.format('%.0f/', c.number) .. head .. '\0' .. scope)
    end
    call('HDEL', P .. 'claimants', head)
    hand_on(c)
    promote_claim(scope, c)
    call('HINCRBY', P .. 'verdicts', 'evict', 1)
    return head
  end

  -- Evicts heads that have been running for too long while others wait, at most `limit`.
  local function evict_overdue(limit)
    local scopes = call('ZRANGEBYSCORE', P .. 'evictions', '-inf', now, 'LIMIT', 0, limit)
    for i = 1, #scopes do
      local c = read_claim(scopes[i])
      if c and c.number > 0 and c.timeout > 0 and c.since + c.timeout <= now then
        evict(scopes[i])
      else
        call('ZREM', P .. 'evictions', scopes[i])
      end
    end
    state.evict = tonumber(call('ZRANGE', P .. 'evictions', 0, 0, 'WITHSCORES')[2] or 0)
    return #scopes
  end

  return {admit = admit, come_back = come_back, evict = evict, evict_overdue = evict_overdue, leave = leave,
    read_claim = read_claim, start = start, unfollow = unfollow}
end

local made_dedup
function dedup()
  made_dedup = made_dedup or make_dedup()
  return made_dedup
end
