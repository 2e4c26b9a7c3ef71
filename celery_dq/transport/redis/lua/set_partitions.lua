-- Changes how many partitions the queue has. Called on partition 0, which decides; the others follow it.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
-- ARGV
--   partitions: the new number
-- RETURNS
--   1 when it is stored; 0 when the partition has messages, and nothing was changed
-- COST
--   3 commands
-- GUARANTEE
--   From then on, this partition refuses messages of clients that know another number.
--@include partition
if not (tonumber(ARGV[1]) and tonumber(ARGV[1]) >= 1) then
  return redis.error_reply('DQINVALID set_partitions: partitions must be a number from 1')
end
if call('HLEN', P .. 'messages') > 0 or tonumber(call('HGET', KEYS[1], 'held') or 0) > 0 then return 0 end
call('HSET', KEYS[1], 'partitions', ARGV[1])
return 1
