-- Gives back everything a consumer holds as unstarted, a chunk a call, and then ends its lease.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   wake LIST
--   tombstones ZSET
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   tenant:<tenant> ZSET
--   sole HASH
--   held:<consumer> HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   consumer: who goes
--   limit: most messages to give back, at most 1000
-- RETURNS
--   number of messages left; 0 means that the lease has ended too
-- COST
--   those of a release
-- GUARANTEE
--   No delivery is counted; rate tokens and turns are given back. Settled messages are dropped.
--@include state
--@include full
--@include give_back
--@include wake
local consumer = ARGV[1]
give_back(consumer, some_held(consumer, math.min(tonumber(ARGV[2]), 1000)), 'unstarted', 0, '')
local left = call('HLEN', P .. 'held:' .. consumer)
if left == 0 then
  call('ZREM', P .. 'leases', consumer)
  if state.owner == consumer then state.owner = '' end
end
wake()
save()
return left
