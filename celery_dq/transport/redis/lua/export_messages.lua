-- Puts messages of a tenant that belong to another partition into the outbox, or returns what lies there.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   deliveries HASH
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   outbox LIST
-- ARGV
--   map: the map by which they move
--   tenant: the tenant
--   to: the number of the partition that gets the messages
--   n: number of ids, at most 500
--   id*: ids of its waiting and delayed messages and dead letters
-- RETURNS
--   nil when messages are named and this partition has another map, and nothing was changed; else
--   an array: the number of the outbox, '0' when it is empty; its tenant; the number of the partition that gets it; how
--   many of the waiting messages that were named stay; the time to which the clock had run when the present change began,
--   µs; then per message its packed entry and its record
-- COST
--   some 20 commands, and at most four per id
-- GUARANTEE
--   A message in the outbox is not served here, and counts as claimed for a cancellation. A message with a dedup key stays,
--   because its lock is here. A delayed message without a readable header leaves.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses partition_map
--@uses tenant_placement
--@uses wake
local tenant, to, n = ARGV[2], ARGV[3], tonumber(ARGV[4])
if n > 500 then return redis.error_reply('DQINVALID export_messages: at most 500 messages a call') end
-- A mover that stood still for long must take nothing out: this may be the home of the tenant again.
if n > 0 and dq.stored_map() ~= ARGV[1] then return nil end
local kept = 0
if n > 0 and call('EXISTS', P .. 'outbox') == 0 then
  dq.expand_singles({tenant})
  local key = P .. 'tenant:' .. tenant
  local entries, waiting, delayed, lost = {}, {}, {}, {}
  local function add(id, kind, score, info)
    entries[#entries + 1] = cmsgpack.pack({id, kind, score, call('HGET', P .. 'deliveries', id) or '', info or ''})
  end
  for i = 1, n do
    local id = ARGV[4 + i]
    local record, place = call('HGET', P .. 'messages', id), call('ZSCORE', key, id)
    local due = record and not place and call('ZSCORE', P .. 'delayed', id)
    if place and not record then
      lost[#lost + 1] = id
    elseif place and (not dq.header(record) or dq.is_keyed(record)) then
      kept = kept + 1
    elseif place then
      add(id, 'waiting', place)
      waiting[#waiting + 1] = id
    elseif due and (not dq.header(record) or not dq.is_keyed(record)) then
      add(id, 'delayed', due)
      delayed[#delayed + 1] = id
    end
    if not place and call('HEXISTS', P .. 'dead', id) == 1 then
      add(id, 'dead', call('ZSCORE', P .. 'dead_index', id) or '0', call('HGET', P .. 'dead_info', id))
    end
  end
  if #entries > 0 then call('RPUSH', P .. 'outbox', text(next_seq()), tenant, to, unpack(entries)) end
  write('ZREM', key, waiting)
  write('ZREM', key, lost)
  write('ZREM', P .. 'delayed', delayed)
  dq.replace({tenant})
  dq.wake()
  save()
end
local stored = call('LRANGE', P .. 'outbox', 0, -1)
local reply = {stored[1] or '0', stored[2] or tenant, stored[3] or to, text(kept), call('HGET', KEYS[1], 'sealed') or '0'}
for i = 4, #stored do
  local entry = cmsgpack.unpack(stored[i])
  local record = call('HGET', P .. (entry[2] == 'dead' and 'dead' or 'messages'), entry[1])
  if record then
    reply[#reply + 1] = stored[i]
    reply[#reply + 1] = record
  end
end
return reply
