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
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--   held:<consumer> HASH
--@include clock
--@include header
--@include lease
--@include waiting_times
-- Returns whether no message is delayed, discarded or was in a crash, and no tenant has a limit. One command shows it.
local function has_no_rare_keys()
  return call('EXISTS', P .. 'delayed', P .. 'discards', P .. 'deliveries', P .. 'quotas', P .. 'pauses',
    P .. 'throttled', P .. 'at_concurrency', P .. 'paused', P .. 'finish_tags', P .. 'limiter') == 0
end

-- Claims up to `want` messages when all of them are plain: beside `has_no_rare_keys`, the queue has no pause, and each
-- of the first tenants in turn, if any, has a single message, which may run and has no dedup key, and no counts of
-- claimed messages end (see `running`). For such messages the rules of the other includes come down to these commands;
-- tests/lua/test_plain.py compares both. `known` are the texts of `epoch`, `claim`, `held`, `v`, `floor`, `evict`,
-- `next_look_owner`, `paused_until`, `resume_at`, `sets`, `claim_window`, `waits_alone` and `settled`; `finished`
-- messages were finished before, `settled` of them settled. Returns the reply, or nil, when nothing was written.
local function claim_plain(consumer, lease_ms, want, known, finished, settled, stale)
  if (known[1] or '0') ~= '0' or (known[6] or '0') ~= '0' or (known[7] or '') ~= '' or (known[10] or '0') ~= '0'
    or (known[8] or '0') ~= '0' then return nil end
  local found = call('ZRANGE', P .. 'turn', '0', digits(want - 1), 'WITHSCORES')
  local deadline = call('ZSCORE', P .. 'leases', consumer)
  if not deadline then return nil end
  local names, ids, n = {}, {}, #found / 2
  local singles, records, slots
  local has_priorities = false
  if n > 0 then
    for i = 1, n do names[i] = found[2 * i - 1] end
    singles = call('HMGET', P .. 'single', unpack(names))
    for i = 1, n do
      if not singles[i] or #singles[i] < 9 then return nil end
      ids[i] = string.sub(singles[i], 9)
    end
    records = call('HMGET', P .. 'messages', unpack(ids))
    for i = 1, n do
      local priority, _, expires = read_header(records[i])
      if not priority or string.byte(records[i], 3) >= 2 or (expires > 0 and expires <= now) then return nil end
      if priority > 0 then has_priorities = true end
    end
    if n > 1 then
      slots = call('HMGET', P .. 'running', unpack(names))
      for i = 1, n do
        if slots[i] and #slots[i] == 65 then return nil end
      end
    end
  end

  local number, v, floor = (known[2] or 0) + math.min(n, 1), known[4] or 0, known[5] or 0
  local first = digits(number) .. '||'
  local reply, held, running = {'0', '-1', digits(stale), '0', '-1'}, {}, {}
  local waits = n > 0 and unpack_waits(known[12])
  for i = 1, n do
    local tag, charge, score = found[2 * i], 1, struct.unpack('>d', singles[i])
    add_wait(waits, score, has_priorities and string.byte(records[i], 2) or 0)
    v, floor = math.max(v, tag), math.max(floor, tag + charge)
    held[2 * i - 1] = ids[i]
    held[2 * i] = struct.pack('>dddBdc0', number, score, now, 0, charge, names[i])
    if slots then
      running[2 * i - 1] = names[i]
      running[2 * i] = digits((slots[i] or 0) + 1)
    end
    reply[3 * i + 3], reply[3 * i + 4], reply[3 * i + 5] = ids[i], first, records[i]
  end
  -- First, because an entry that is no number must change nothing.
  if n == 1 and type(redis.pcall('HINCRBY', P .. 'running', names[1], '1')) == 'table' then return nil end
  renew_lease(consumer, deadline, lease_ms)
  -- The claim has looked for work itself.
  call('DEL', P .. 'wake')
  write('HSET', P .. 'held:' .. consumer, held)
  write('HSET', P .. 'running', running)
  if n > 0 then call('ZREMRANGEBYRANK', P .. 'turn', '0', digits(n - 1)) end
  write('HDEL', P .. 'single', names)
  if n == want and call('EXISTS', P .. 'turn') == 1 then
    reply[1] = '1'
    call('RPUSH', P .. 'wake', '1')
    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
  else
    -- Virtual time passes all tags when no tenant is in turn.
    v = math.max(v, floor)
  end
  local state = {'claim', digits(number), 'held', digits((known[3] or 0) - finished + n), 'v', digits(v), 'floor',
    digits(floor)}
  if n > 0 then state[9], state[10] = 'waits_alone', struct.pack(WAITS, unpack(waits)) end
  if settled > 0 then
    state[#state + 1] = 'settled'
    state[#state + 1] = digits((known[13] or 0) + settled)
  end
  write('HSET', KEYS[1], state)
  return reply
end
