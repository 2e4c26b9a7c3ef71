-- Lets others look: a consumer gives its appointment up, what is due is promoted, and there is a token if there must
-- be one.
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
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
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
--   consumer: who looks no more and keeps no appointment from now on; '' for nobody
-- RETURNS
--   1 when something may be served right now, else 0
-- COST
--   some 15 commands; promotes at most 128 of each kind
-- GUARANTEE
--   It takes nothing, and wakes one consumer at most, which may find nothing; however often it is called, there is one
--   token. Only the appointment of the consumer named is given up, so a consumer names none but itself.
--@include state
--@include full
--@include promote
--@include wake
if state.owner == ARGV[1] then state.owner = '' end
promote(128)
wake()
save()
if call('EXISTS', P .. 'turn', P .. 'discards') > 0 then return 1 end
local due = next_due()
return due and due <= now and 1 or 0
