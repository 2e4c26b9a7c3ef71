-- Dedup locks: of the messages with one key at most one runs and at most one waits.
--
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   deliveries HASH
--   dedup_locks HASH
--   dedup_members HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
--@uses dedup_fast_path
--@uses discard
-- The rules are those of the machine in `celery_dq/dedup/machine.py`. A lock lasts as long as its message, so a
-- script that ends or returns a message with a key calls these functions. Messages without a key cost no command.
--
-- `dedup_locks` holds per scope (tenant and key) the head, its heir (a retry of the head) and the tail. `dedup_members` holds
-- the scope of each of these messages. Heir and tail are in `blocked` until they are promoted. A declined message
-- whose result is awaited is a follower: it is in `followers:<covering>`, and becomes a discard when the covering
-- message ends.
local function make_dedup()
  local MAX_FOLLOWERS = 1000
  local section_of, scope_of, admitted = dq.fast_dedup().section_of, dq.fast_dedup().scope_of, dq.fast_dedup().admitted

  -- The same section with its flags by name.
  local function with_flags(section)
    local flags = section.flags
    section.replace, section.waiting = flags % 2 == 1, flags % 4 >= 2
    section.follow, section.awaited = flags % 8 >= 4, flags % 16 >= 8
    return section
  end

  -- since (µs, 0 until it is claimed), claim number, timeout (µs), which of the three have followers
  local function read_lock(scope)
    local packed = call('HGET', P .. 'dedup_locks', scope)
    if not packed then return nil end
    local since, number, timeout, marks, head, heir, tail = struct.unpack('>dddBHHH', packed)
    local function id_at(from, size)
      if size > 0 then return string.sub(packed, from, from + size - 1) end
    end
    return {since = since, number = number, timeout = timeout, head = id_at(32, head), heir = id_at(32 + head, heir),
      tail = id_at(32 + head + heir, tail), follow = {head = marks % 2 == 1, heir = math.floor(marks / 2) % 2 == 1,
      tail = marks >= 4}}
  end

  local function write_lock(scope, c)
    if not c.head then
      call('HDEL', P .. 'dedup_locks', scope)
      return
    end
    local heir, tail, follow = c.heir or '', c.tail or '', c.follow
    call('HSET', P .. 'dedup_locks', scope, struct.pack('>dddBHHH', c.since, c.number, c.timeout,
      (follow.head and 1 or 0) + (follow.heir and 2 or 0) + (follow.tail and 4 or 0), #c.head, #heir, #tail)
      .. c.head .. heir .. tail)
  end

  -- Notes when a head that runs and has a message behind it is to be evicted.
  local function watch(scope, c)
    if c.timeout > 0 and c.number > 0 and (c.heir or c.tail) then
      local deadline = c.since + c.timeout
      call('ZADD', P .. 'evictions', deadline, scope)
      if state.evict == 0 or deadline < state.evict then state.evict = deadline end
    end
  end

  -- Moves a blocked message to the place where it would have waited.
  local function unblock(id)
    local score, record = call('ZSCORE', P .. 'blocked', id), call('HGET', P .. 'messages', id)
    local priority, due, _, length = dq.header(record)
    if score and priority then
      if due > now then
        call('ZADD', P .. 'delayed', due, id)
      else
        local tenant = dq.tenant_name(record, length)
        dq.add_waiting({tenant}, {[tenant] = {tonumber(score), id}})
      end
    end
    call('ZREM', P .. 'blocked', id)
  end

  -- Replaces a head that is gone by the heir, else by the tail.
  local function promote_lock(scope, c)
    if c.timeout > 0 and (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
    if c.heir then
      c.head, c.follow.head, c.heir, c.follow.heir = c.heir, c.follow.heir, nil, false
    else
      c.head, c.follow.head, c.tail, c.follow.tail = c.tail, c.follow.tail, nil, false
    end
    c.since, c.number, c.timeout = 0, 0, 0
    write_lock(scope, c)
    if c.head then unblock(c.head) end
  end

  local function follow(id, covering)
    call('HSET', P .. 'following', id, covering)
    call('RPUSH', P .. 'followers:' .. covering, id)
  end

  -- Ends the wait of this message for a result. Returns whether it was a follower.
  local function unfollow(id)
    local covering = call('HGET', P .. 'following', id)
    if not covering then return false end
    call('HDEL', P .. 'following', id)
    call('LREM', P .. 'followers:' .. covering, 1, id)
    return true
  end

  -- Moves all followers in one call, because no later call would move the others. There are more than MAX_FOLLOWERS
  -- only where evicted messages came back.
  local function move_followers(from, to)
    for _ = 1, call('LLEN', P .. 'followers:' .. from) do
      call('HSET', P .. 'following', call('RPOPLPUSH', P .. 'followers:' .. from, P .. 'followers:' .. to), to)
    end
  end

  -- Returns whether one more may follow. The followers of a head and those of its heir count together: they will wait
  -- for the same result.
  local function has_room(c, place)
    local count = call('LLEN', P .. 'followers:' .. c[place])
    if place == 'heir' then count = count + call('LLEN', P .. 'followers:' .. c.head) end
    return count < MAX_FOLLOWERS
  end

  local function record_of(id)
    return admitted[id] and admitted[id].record or call('HGET', P .. 'messages', id)
  end

  -- Returns whether this message would become a follower when it is replaced, and has too many followers itself.
  local function may_not_follow(id)
    if call('LLEN', P .. 'followers:' .. id) < MAX_FOLLOWERS then return false end
    local record = record_of(id)
    return record and dq.is_keyed(record) and with_flags(section_of(record)).awaited
  end

  -- Moves the followers of the head to its heir, whose result they get.
  local function pass_lock_on(c)
    if c.follow.head and c.heir then
      move_followers(c.head, c.heir)
      c.follow.heir = true
    end
  end

  -- Turns the followers of this message into discards, which report its result.
  local function settle_followers(id)
    local found = call('LRANGE', P .. 'followers:' .. id, 0, -1)
    if #found == 0 then return end
    local discards = {}
    for i = 1, #found do
      local record = call('HDEL', P .. 'following', found[i]) == 1 and call('HGET', P .. 'messages', found[i])
      if record then
        local priority, _, _, length = dq.header(record)
        local tenant = priority and dq.tenant_name(record, length) or ''
        discards[#discards + 1] = {id = found[i], tenant = tenant, reason = 'covered:' .. id}
      end
    end
    dq.add_discards(discards)
    call('DEL', P .. 'followers:' .. id)
  end

  -- Frees the lock of a message that runs no more or will not run. `over`: it has ended, else it is still to be
  -- discarded.
  local function leave(id, over)
    local scope = call('HGET', P .. 'dedup_members', id)
    local c = scope and read_lock(scope)
    if scope then call('HDEL', P .. 'dedup_members', id) end
    local place = c and (c.head == id and 'head' or c.heir == id and 'heir' or c.tail == id and 'tail')
    local followed = not place or c.follow[place]
    if place == 'head' then
      if over then pass_lock_on(c) end
      promote_lock(scope, c)
    elseif place then
      c[place], c.follow[place] = nil, false
      if c.timeout > 0 and not (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
      write_lock(scope, c)
      call('ZREM', P .. 'blocked', id)
    end
    if over and followed then settle_followers(id) end
  end

  -- Removes a message from where it waits, because the message `by` has replaced it.
  local function displace(id, by)
    local mate = admitted[id]
    local record = record_of(id)
    local priority, _, _, length = dq.header(record)
    move_followers(id, by)
    call('HDEL', P .. 'dedup_members', id)
    call('ZREM', P .. 'blocked', id)
    call('ZREM', P .. 'delayed', id)
    if not priority then return end
    if not mate then
      local tenant = dq.tenant_name(record, length)
      dq.expand_singles({tenant})
      call('ZREM', P .. 'tenant:' .. tenant, id)
      dq.replace({tenant})
    end
    local d = dq.is_keyed(record) and with_flags(section_of(record))
    if mate then mate.blocked, mate.following, mate.dropped = false, d.awaited, not d.awaited end
    if d and d.awaited then
      follow(id, by)
    else
      state.dropped = state.dropped + call('HDEL', P .. 'messages', id)
      call('HDEL', P .. 'deliveries', id)
    end
  end

  -- As `admit` of a free lock, for a scope that has an entry.
  local function admit(message, scope)
    local id, d = message.id, with_flags(message.section)
    local c = read_lock(scope)
    while c and c.head and not admitted[c.head] and call('HEXISTS', P .. 'messages', c.head) == 0 do
      -- Another program removed the message of the head.
      call('HDEL', P .. 'dedup_members', c.head)
      promote_lock(scope, c)
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
        write_lock(scope, c)
      end
    else
      admitted[id] = message
      message.blocked = place ~= 'head'
      call('HSET', P .. 'dedup_members', id, scope)
      if replaced then displace(replaced, id) end
      if replaced or message.returned then
        c.follow[place] = call('EXISTS', P .. 'followers:' .. id) == 1
      end
      write_lock(scope, c)
      if message.blocked then watch(scope, c) end
    end
    call('HINCRBY', P .. 'verdicts', verdict, 1)
    if replaced then call('HINCRBY', P .. 'verdicts', 'replace', 1) end
    return verdict, ahead, replaced
  end

  -- Notes that this message was claimed now, under this claim number.
  local function start(id, scope, timeout, number)
    local c = read_lock(scope)
    if c and c.head == id then
      c.since, c.number, c.timeout = now, number, timeout
      write_lock(scope, c)
      watch(scope, c)
    end
  end

  -- Returns the fate of an in-flight message that is released: 'wait' (it goes to its old place), 'aside' (it
  -- waits for another message) or 'gone' (it was evicted, and another message covers it).
  local function return_to_lock(entry, record)
    local scope = call('HGET', P .. 'dedup_members', entry.id)
    local c = scope and read_lock(scope)
    if c and c.head == entry.id then
      if c.timeout > 0 and (c.heir or c.tail) then call('ZREM', P .. 'evictions', scope) end
      c.since, c.number, c.timeout = 0, 0, 0
      write_lock(scope, c)
      return 'wait'
    end
    local d = section_of(record)
    -- It may wait, is kept when its result is awaited, and replaces no other message.
    d.flags, d.continues = d.flags % 16 >= 8 and 14 or 2, ''
    local message = {id = entry.id, tenant = entry.owner, section = d, returned = true}
    local verdict = admit(message, scope_of(entry.owner, d.key))
    if verdict == 'accept' then return 'wait' end
    if verdict == 'block' then
      call('ZADD', P .. 'blocked', entry.score, entry.id)
      return 'aside'
    end
    return verdict == 'follow' and 'aside' or 'gone'
  end

  -- Takes the lock from its head, whose fencing token is void from now on, and notifies the worker that runs it.
  local function evict(scope)
    local c = read_lock(scope)
    if not c then return nil end
    local head = c.head
    if c.number > 0 then
      call('PUBLISH', P .. 'evicted', string.format('%.0f/', c.number) .. head .. '\0' .. scope)
    end
    call('HDEL', P .. 'dedup_members', head)
    pass_lock_on(c)
    promote_lock(scope, c)
    call('HINCRBY', P .. 'verdicts', 'evict', 1)
    return head
  end

  -- Evicts heads that have been running for too long while other messages wait, at most `limit`.
  local function evict_overdue(limit)
    local scopes = call('ZRANGEBYSCORE', P .. 'evictions', '-inf', now, 'LIMIT', 0, limit)
    for i = 1, #scopes do
      local c = read_lock(scopes[i])
      if c and c.number > 0 and c.timeout > 0 and c.since + c.timeout <= now then
        evict(scopes[i])
      else
        call('ZREM', P .. 'evictions', scopes[i])
      end
    end
    state.evict = tonumber(call('ZRANGE', P .. 'evictions', 0, 0, 'WITHSCORES')[2] or 0)
    return #scopes
  end

  return {admit = admit, return_to_lock = return_to_lock, evict = evict, evict_overdue = evict_overdue, leave = leave,
    read_lock = read_lock, start = start, unfollow = unfollow}
end

local made_dedup
function dq.dedup()
  made_dedup = made_dedup or make_dedup()
  return made_dedup
end
