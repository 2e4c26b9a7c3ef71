-- Turns what waits for a tenant into discards, a chunk a call.
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
--   tenant: whose messages
--   reason: what the discards are flagged with
--   limit: most messages to move, at most 1000
-- RETURNS
--   an array of two: messages moved, messages left
-- COST
--   some 20 commands
-- GUARANTEE
--   Delayed and claimed messages are left alone.
--@include state
--@include full
--@include discard
--@include place
--@include wake
local tenant = ARGV[1]
local key = P .. 'tenant:' .. tenant
unfold({tenant})
local ids = call('ZRANGE', key, 0, math.min(tonumber(ARGV[3]), 1000) - 1)
if #ids == 0 then return {'0', '0'} end
discard(ids, ARGV[2])
call('ZREM', key, unpack(ids))
replace({tenant})
wake()
save()
return {tostring(#ids), tostring(call('ZCARD', key))}
