-- Stores messages of a tenant that move here, from the outbox of another partition.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   delayed ZSET
--   deliveries HASH
--   tombstones ZSET
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   arriving ZSET
--   imported HASH
-- ARGV
--   source: the number of the partition that it comes from
--   number: the number of the outbox there
--   tenant: the tenant
--   map: the map by which it moves
--   sealed_us: the time to which the clock of the source had run when it got that map
--   head_start_us: by how much each step of priority goes before its time
--   waits: '1' when the tenant waits here until the other partition has no message that belongs here, else '0'
--   n: number of messages, at most 1000
--   (packed, record)*: entry of the outbox and record of each message
-- RETURNS
--   1 when the messages are here now, or were before; 0 when this partition has another map, and nothing was changed
-- COST
--   some 20 commands, and at most six per message
-- GUARANTEE
--   The messages of an outbox are stored once. They keep the order that they had. Where the tenant waits, they come before all
--   messages that were published here since the move has begun. Their crashes count on. A task that has a tombstone becomes a discard.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses unique_ids
--@uses partition_map
--@uses tenant_placement
--@uses discard
--@uses wake
local source, number, tenant, map, n = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[8])
if n > 1000 or #ARGV ~= 8 + 2 * n then
  return redis.error_reply('DQINVALID import_messages: n does not fit the number of arguments')
end
local last = call('HGET', P .. 'imported', source)
if last and not finite(last) then
  -- Without it, the messages could be stored twice.
  error('DQCORRUPT the entry ' .. source .. ' of ' .. P .. 'imported is not a number: another program has written it')
end
if last and finite(last) >= number then return 1 end
if dq.stored_map() ~= map then return 0 end
if ARGV[7] == '1' then dq.expect({tenant}, dq.map_version(map)) end
-- Where the clocks of two servers differ, the messages from there must not come after those that were published here.
local since = call('ZSCORE', P .. 'arriving', tenant)
local ahead = since and math.max(tonumber(ARGV[5]) - tonumber(since), 0) or 0
state.head = tonumber(ARGV[6])
local waiting, discards = {}, {}
for i = 1, n do
  local record = ARGV[8 + 2 * i]
  local id, kind, score, deliveries, info = unpack(cmsgpack.unpack(ARGV[7 + 2 * i]))
  if call('HEXISTS', P .. 'messages', id) == 1 or call('HEXISTS', P .. 'dead', id) == 1 then id = dq.second_id(id) end
  if kind == 'dead' then
    call('HSET', P .. 'dead', id, record)
    if info ~= '' then call('HSET', P .. 'dead_info', id, info) end
    call('ZADD', P .. 'dead_index', score, id)
  else
    call('HSET', P .. 'messages', id, record)
    if deliveries ~= '' then call('HSET', P .. 'deliveries', id, deliveries) end
    local stone = call('ZSCORE', P .. 'tombstones', dq.base_id(id))
    if stone and tonumber(stone) > now then
      discards[#discards + 1] = {id = id, tenant = tenant, reason = 'cancelled'}
    elseif kind == 'delayed' then
      call('ZADD', P .. 'delayed', score, id)
    else
      waiting[#waiting + 1] = digits(tonumber(score) - ahead)
      waiting[#waiting + 1] = id
    end
  end
end
if #discards > 0 then dq.add_discards(discards) end
if #waiting > 0 then dq.add_waiting({tenant}, {[tenant] = waiting}) end
call('HSET', P .. 'imported', source, ARGV[2])
dq.wake()
save()
return 1
