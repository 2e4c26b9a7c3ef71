-- Changes the map of the queue. Called on partition 0, which decides; the others follow it.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   arrived SET
-- ARGV
--   before: the map that is replaced
--   map: the new map, such as '7<4#1'
--   spreads: the spreads of tenants that belong to it, as JSON; '' for none
-- RETURNS
--   an array of two: the map that is stored now, and its spreads: the new ones, or other ones when another client was faster
-- COST
--   three commands
-- GUARANTEE
--   From then on, this partition refuses messages of clients that know another map.
--@include partition
local stored, seq, spreads = unpack(call('HMGET', KEYS[1], 'partitions', 'seq', 'spreads'))
if (stored or '1') ~= ARGV[1] then return {stored or '1', spreads or ''} end
call('HSET', KEYS[1], 'partitions', ARGV[2], 'sealed', seq or '0', 'spreads', ARGV[3])
-- A tenant that arrived by the map before has not arrived by this one.
call('UNLINK', P .. 'arrived')
return {ARGV[2], ARGV[3]}
