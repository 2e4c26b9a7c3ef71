-- Deletes dead letters.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
-- ARGV
--   n: number of dead letters, at most 1000
--   id*: their message ids
-- RETURNS
--   how many were deleted
-- COST
--   four commands, and one look at each message of the outbox
-- GUARANTEE
--   No other key is changed. A dead letter in the outbox stays: another partition may already have it, and would keep it.
--@include partition
--@uses outbox
local n = tonumber(ARGV[1])
if n == 0 then return 0 end
local ids, moving = {}, dq.in_outbox()
for i = 1, n do
  local id = ARGV[i + 1]
  if not moving[id] then ids[#ids + 1] = id end
end
if #ids == 0 then return 0 end
local found = call('HDEL', P .. 'dead', unpack(ids))
call('HDEL', P .. 'dead_info', unpack(ids))
call('ZREM', P .. 'dead_index', unpack(ids))
return found
