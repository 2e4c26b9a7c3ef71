-- Gives messages back to their old places and frees their slots; settled ones are dropped.
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
--   consumer: who holds them
--   mode: 'unstarted' gives token and turn back, 'requeue' neither, 'crashed' counts; the first gives the turn back
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
--   worker: who gives up on it, for the dead letter
--   n: number of tags, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   some 30 commands, and two per tenant
-- GUARANTEE
--   A tag that is stale changes nothing. A message that was cancelled meanwhile, or is dead, comes back as a
--   discard; any other one has its old score, so its old place.
--@include state
--@include full
--@include give_back
--@include wake
local mode = ARGV[2]
if mode ~= 'unstarted' and mode ~= 'requeue' and mode ~= 'crashed' then
  return redis.error_reply('DQINVALID release: mode must be unstarted, requeue or crashed')
end
local entries, stale = read_tags(ARGV[1], 5)
if #entries > 0 then
  give_back(ARGV[1], entries, mode, tonumber(ARGV[3]), ARGV[4])
  wake()
  save()
end
return stale
