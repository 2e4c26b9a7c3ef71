-- Takes a dedup key from the message that has it, by an operator's order; who waits behind it goes on.
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
--   tenant:<tenant> ZSET
--   sole HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   tenant: whose key
--   key: the dedup key
-- RETURNS
--   the id of the message that had it, or ''
-- COST
--   some 20 commands
-- GUARANTEE
--   The message itself stays where it is; whether it waits or runs, it has no claim any more.
--@include state
--@include dedup
--@include wake
local head = dedup().evict(keyed().scope_of(ARGV[1], ARGV[2]))
if head then
  wake()
  save()
end
return head or ''
