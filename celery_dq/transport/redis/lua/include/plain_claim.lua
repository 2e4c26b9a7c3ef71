-- Claims plain messages.
--
-- DERIVES
--   messages HASH
--   single HASH
--   turn ZSET
--   running HASH
--   leases ZSET
--   wake LIST
--   delayed ZSET
--   discards ZSET
--   deliveries HASH
--   quotas HASH
--   pauses ZSET
--   arriving ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--   held:<consumer> HASH
--@include clock
--@include header
--@include lease
--@include plain_limits
--@include running
--@include waiting_times
-- Returns whether a tenant may have a limit or a pause; and whether a message may be delayed, discarded or have been in a
-- crash, or a tenant be paused, but not by its quota. One command shows that there is none of these.
local function look_for_rare_keys()
  local delayed, discards, deliveries = P .. 'delayed', P .. 'discards', P .. 'deliveries'
  local pauses, arriving = P .. 'pauses', P .. 'arriving'
  if call('EXISTS', delayed, discards, deliveries, pauses, arriving, P .. 'quotas', P .. 'throttled',
    P .. 'at_concurrency', P .. 'paused', P .. 'finish_tags', P .. 'limiter') == 0 then return false, false end
  return true, call('EXISTS', delayed, discards, deliveries, pauses, arriving) > 0
end

-- Claims up to `want` messages when all of them are plain: the queue has no pause, and each of the first tenants in
-- turn, if any, has a single message, which may run and has no dedup key, and no counts of claimed messages end (see
-- `running`). When a tenant may have a limit, no tenant waits at one, and those in turn get one message each and are within
-- their limits. For such messages the rules of the other includes come down to these commands;
-- tests/lua/test_plain.py compares both. `known` are the texts of `epoch`, `claim`, `held`, `v`, `floor`, `evict`,
-- `next_look_owner`, `paused_until`, `sets`, `waits_alone` and `settled`; `finished`
-- messages were finished before, `settled` of them settled. `free` is how many messages may belong to tenants with a
-- concurrency limit, nil when no tenant has a limit. Returns the reply, or nil, when nothing was written.
local function claim_plain(consumer, lease_ms, want, known, finished, settled, stale, free)
  local epoch, last_claim, last_held, v, floor, evict, next_look_owner, paused_until, sets, waits_alone, last_settled =
    unpack(known)
  if (epoch or '0') ~= '0' or (evict or '0') ~= '0' or (next_look_owner or '') ~= '' or (sets or '0') ~= '0'
    or (paused_until or '0') ~= '0' or not pcall(sum, last_claim, last_held, v, floor, last_settled) then return nil end
  if free and call('EXISTS', P .. 'throttled', P .. 'at_concurrency') > 0 then return nil end
  local found = call('ZRANGE', P .. 'turn', '0', digits(free and want or want - 1), 'WITHSCORES')
  if free and #found > 2 * want then return nil end
  local deadline = call('ZSCORE', P .. 'leases', consumer)
  if not deadline then return nil end
  local names, ids, scores, n = {}, {}, {}, #found / 2
  local singles, records, slots, quotas, arrivals
  local has_priorities = false
  if n > 0 then
    for i = 1, n do names[i] = found[2 * i - 1] end
    singles = call('HMGET', P .. 'single', unpack(names))
    for i = 1, n do
      if not singles[i] or #singles[i] < 9 then return nil end
      scores[i] = struct.unpack('>d', singles[i])
      if scores[i] ~= scores[i] then return nil end
      ids[i] = string.sub(singles[i], 9)
    end
    records = call('HMGET', P .. 'messages', unpack(ids))
    for i = 1, n do
      local priority, _, expires, _, flags = read_header(records[i])
      if not priority or flags >= 2 or (expires > 0 and expires <= now) then return nil end
      if priority > 0 then has_priorities = true end
    end
    if free then
      quotas, slots, arrivals = limits_within(names)
      if not quotas then return nil end
      for i = 1, n do
        if quotas[i].concurrency > 0 then free = free - 1 end
      end
      if free < 0 then return nil end
    elseif n > 1 then
      slots = call('HMGET', P .. 'running', unpack(names))
      for i = 1, n do
        if slots[i] and #slots[i] == COUNTED then return nil end
      end
    end
  end

  local number, last = (last_claim or 0) + math.min(n, 1), 0
  v, floor = v or 0, floor or 0
  local first = digits(number) .. '||'
  local reply, held, running, permits = {'0', '-1', digits(stale), free and '3' or '0', '-1'}, {}, {}, {}
  local waits = n > 0 and unpack_waits(waits_alone)
  for i = 1, n do
    local tag, charge, score = found[2 * i], 1, scores[i]
    add_wait(waits, score, has_priorities and string.byte(records[i], 2) or 0)
    local quota = quotas and quotas[i]
    v = math.max(v, tag)
    if quota then charge = 1 / quota.weight end
    if quota and quota.interval > 0 then
      permits[#permits + 1], permits[#permits + 2] = digits(math.max(arrivals[i], now) + quota.interval), names[i]
    end
    if quota and quota.interval + quota.concurrency > 0 then
      last = math.max(last, tag + charge)
    else
      floor = math.max(floor, tag + charge)
    end
    held[2 * i - 1] = ids[i]
    held[2 * i] = struct.pack('>dddBdc0', number, score, now, 0, charge, names[i])
    if slots then
      running[2 * i - 1] = names[i]
      running[2 * i] = digits(slots_of(slots[i]) + 1)
    end
    reply[3 * i + 3], reply[3 * i + 4], reply[3 * i + 5] = ids[i], first, records[i]
  end
  -- First, because an entry that is not a number must change nothing.
  if n == 1 and not slots and type(redis.pcall('HINCRBY', P .. 'running', names[1], '1')) == 'table' then return nil end
  renew_lease(consumer, deadline, lease_ms)
  -- The claim has looked for work itself.
  call('DEL', P .. 'wake')
  write('HSET', P .. 'held:' .. consumer, held)
  write('HSET', P .. 'running', running)
  write('ZADD', P .. 'limiter', permits)
  if n > 0 then call('ZREMRANGEBYRANK', P .. 'turn', '0', digits(n - 1)) end
  write('HDEL', P .. 'single', names)
  if not free and n == want and call('EXISTS', P .. 'turn') == 1 then
    reply[1] = '1'
    call('RPUSH', P .. 'wake', '1')
    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
  else
    -- Virtual time passes all tags when no tenant is in turn.
    v = math.max(v, floor)
  end
  if free then
    local tags = call('ZREVRANGE', P .. 'finish_tags', '0', '0', 'WITHSCORES')
    if tags[2] then call('UNLINK', P .. 'finish_tags') end
    v = math.max(v, last, tags[2] or 0)
    local over = call('ZCOUNT', P .. 'limiter', '-inf', digits(now))
    if over > 0 then call('ZREMRANGEBYRANK', P .. 'limiter', '0', digits(math.min(over, 128) - 1)) end
  end
  local state = {'claim', digits(number), 'held', digits((last_held or 0) - finished + n), 'v', digits(v), 'floor',
    digits(floor)}
  if n > 0 then state[9], state[10] = 'waits_alone', struct.pack(WAITS, unpack(waits)) end
  if settled > 0 then
    state[#state + 1] = 'settled'
    state[#state + 1] = digits((last_settled or 0) + settled)
  end
  write('HSET', KEYS[1], state)
  return reply
end
