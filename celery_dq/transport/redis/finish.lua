-- Done with these messages, settled or not: frees their slots and lets their tenants go on.
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
--   consumer: who holds them
--   n: number of tags, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   some 15 commands, and one per tenant that was at its concurrency
-- GUARANTEE
--   A tag that is stale changes nothing. A slot is freed in the same step in which its message goes.
--@include state
--@include full
--@include held
--@include wake
local entries, stale = read_tags(ARGV[1], 2)
if #entries > 0 then
  finish(ARGV[1], entries)
  wake()
  save()
end
return stale
