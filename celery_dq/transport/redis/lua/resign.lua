-- Releases all messages of a consumer as unstarted, a chunk per call, and then ends its lease.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   leases ZSET
--   held:<consumer> HASH
-- ARGV
--   consumer: the consumer that stops
--   limit: most messages to release, at most 1000
-- RETURNS
--   number of messages left; 0 means that the lease has ended too
-- COST
--   those of a release
-- GUARANTEE
--   No delivery is counted; permits and turns are given back. Settled messages are dropped.
--@include state
--@include out_of_memory_guard
--@uses release
--@uses wake
local consumer = ARGV[1]
local entries = dq.some_held(consumer, math.min(tonumber(ARGV[2]), 1000))
dq.release_messages(consumer, entries, 'unstarted', 0, '')
if #entries > 0 then state.released = state.released + #entries end
local left = call('HLEN', P .. 'held:' .. consumer)
if left == 0 then
  call('ZREM', P .. 'leases', consumer)
  if state.next_look_owner == consumer then state.next_look_owner = '' end
end
dq.wake()
save()
return left
