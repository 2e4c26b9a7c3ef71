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
--   how many there were
-- COST
--   three commands
-- GUARANTEE
--   No other key is changed.
--@include partition
local n = tonumber(ARGV[1])
if n == 0 then return 0 end
local ids = {}
for i = 1, n do ids[i] = ARGV[i + 1] end
local found = call('HDEL', P .. 'dead', unpack(ids))
call('HDEL', P .. 'dead_info', unpack(ids))
call('ZREM', P .. 'dead_index', unpack(ids))
return found
