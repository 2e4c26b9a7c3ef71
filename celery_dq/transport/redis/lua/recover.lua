-- Makes dead letters of messages that nothing names any more, because what named them could not be read.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   discards ZSET
--   deliveries HASH
--   leases ZSET
--   held:<consumer> HASH
--   blocked ZSET
--   following HASH
-- ARGV
--   is_dry: '1' only counts them
--   n: number of messages, at most 1000
--   id*: their message ids
-- RETURNS
--   how many of them nothing names
-- COST
--   four commands, one per living consumer, one look at each message of the outbox, up to three per message that no consumer
--   has, and five more for one that is recovered
-- GUARANTEE
--   A message that waits, is held, or moves to another partition is not changed. The dead letter is written before the
--   message is deleted.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses dead_letter
--@uses in_flight
--@uses outbox
--@uses dedup
local n = tonumber(ARGV[2])
if n == 0 then return 0 end
if n > 1000 then return redis.error_reply('DQINVALID recover: at most 1000 messages a call') end
local ids = {unpack(ARGV, 3, 2 + n)}
local records = call('HMGET', P .. 'messages', unpack(ids))
local named = dq.in_outbox()
local function name_those(found)
  for i = 1, n do named[ids[i]] = named[ids[i]] or found[i] end
end
name_those(call('ZMSCORE', P .. 'delayed', unpack(ids)))
name_those(call('ZMSCORE', P .. 'discards', unpack(ids)))
name_those(call('ZMSCORE', P .. 'blocked', unpack(ids)))
name_those(call('HMGET', P .. 'following', unpack(ids)))
local consumers = call('ZRANGE', P .. 'leases', 0, -1)
for i = 1, #consumers do name_those(call('HMGET', P .. 'held:' .. consumers[i], unpack(ids))) end

local function is_waiting(id, tenant)
  local single = dq.singles_of({tenant})[1]
  return single and dq.read_single(single) == id or call('ZSCORE', P .. 'tenant:' .. tenant, id)
end

local count = 0
for i = 1, n do
  local id, record = ids[i], records[i]
  local length = record and not named[id] and select(4, dq.header(record))
  local tenant = length and dq.tenant_name(record, length)
  if tenant and not is_waiting(id, tenant) then
    count = count + 1
    if ARGV[1] ~= '1' then
      dq.store_dead_letter(id, record, 'recovered', '', finite(call('HGET', P .. 'deliveries', id)) or 0, tenant)
      call('HDEL', P .. 'messages', id)
      call('HDEL', P .. 'deliveries', id)
    end
  end
end
if ARGV[1] ~= '1' then save() end
return count
