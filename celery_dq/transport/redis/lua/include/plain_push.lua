-- Accepts a plain message.
--
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   single HASH
--   turn ZSET
--   wake LIST
--   tombstones ZSET
--   dead HASH
--   quotas HASH
--   pauses ZSET
--   arriving ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--   producer:<producer> STRING
--@include clock
--@include header
--@include plain_limits
-- A message is plain when it may be served at once and has no dedup key, its id is free, and its own tenant has
-- either no backlog or more than one message, and no message of a set of resources waits. Where tenants have limits, its own has no backlog and is within them. For
-- such a message the rules of the other includes come down to these commands; tests/lua/test_plain.py compares both. Returns
-- true, or nil when the message is not plain: then nothing was changed.
local function push_plain(producer, marker_ttl_ms, head, map, sequence, id, record)
  local priority, due, _, length, flags = read_header(record)
  if not priority or due > 0 or flags >= 2 or string.find(id, '~', 1, true)
    or not tonumber(sequence) or string.sub(record, 28, 34) == 'any_of(' then return nil end
  local tenant = string.sub(record, 28, 27 + length)
  local messages, single, dead, wake = P .. 'messages', P .. 'single', P .. 'dead', P .. 'wake'
  local backlog = P .. 'tenant:' .. tenant
  -- One command shows that nothing is limited and nothing waits, as in a partition whose workers keep up, and that a
  -- worker waits.
  local found = call('EXISTS', P .. 'tombstones', P .. 'quotas', P .. 'pauses', P .. 'throttled',
    P .. 'at_concurrency', P .. 'paused', P .. 'finish_tags', P .. 'limiter', single, dead, backlog, wake)
  local is_idle = found == 0
  local quotas, finish = nil, nil
  if not is_idle then
    if found > call('EXISTS', single, dead, backlog, wake) then
      if call('EXISTS', P .. 'tombstones', P .. 'pauses', P .. 'arriving', backlog, dead) > 0 then return nil end
      quotas = limits_within({tenant})
      if not quotas then return nil end
      finish = call('ZSCORE', P .. 'finish_tags', tenant)
    elseif call('HEXISTS', dead, id) == 1 then
      return nil
    end
    if call('HEXISTS', single, tenant) == 1 then return nil end
  end
  local epoch, last_seq, v, floor, last_head, pushed, paused_until, stored_map, sets = unpack(call('HMGET', KEYS[1],
    'epoch', 'seq', 'v', 'floor', 'head', 'pushed', 'paused_until', 'partitions', 'sets'))
  if (epoch or '0') ~= '0' or (paused_until or '0') ~= '0' or (stored_map or '1') ~= map or (sets or '0') ~= '0'
    or not pcall(sum, last_seq, v, floor, pushed) then return nil end
  local is_first = is_idle or quotas or call('EXISTS', backlog) == 0
  if call('HSETNX', messages, id, record) == 0 then return nil end
  if producer ~= '' then
    local marker = P .. 'producer:' .. producer
    local last = call('SET', marker, sequence, 'PX', marker_ttl_ms, 'GET')
    if last and not (tonumber(sequence) > (tonumber(last) or math.huge)) then
      call('SET', marker, last, 'PX', marker_ttl_ms)
      call('HDEL', messages, id)
      return nil
    end
  end

  local seq = math.max((last_seq or 0) + 1, now)
  local score = seq - priority * head
  if is_first then
    call('HSET', single, tenant, struct.pack('>d', score) .. id)
  else
    call('ZADD', backlog, digits(score), id)
  end
  v, floor = v or '0', floor or '0'
  if quotas and quotas[1].interval + quotas[1].concurrency > 0 then
    v = digits(math.max(v, finish or 0))
  elseif quotas then
    v = digits(math.max(v, finish or 0, math.min(floor, v + 1 / quotas[1].weight)))
  elseif v ~= floor then
    v = digits(math.max(v, math.min(floor, v + 1)))
  end
  if finish then call('ZREM', P .. 'finish_tags', tenant) end
  call('ZADD', P .. 'turn', 'NX', v, tenant)
  if is_idle or call('EXISTS', wake) == 0 then
    call('RPUSH', wake, '1')
    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
  end
  pushed = digits((pushed or 0) + 1)
  if tonumber(last_head or 0) == head then
    call('HSET', KEYS[1], 'seq', digits(seq), 'pushed', pushed)
  else
    call('HSET', KEYS[1], 'seq', digits(seq), 'pushed', pushed, 'head', digits(head))
  end
  return true
end
