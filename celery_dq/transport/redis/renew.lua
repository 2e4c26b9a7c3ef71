-- The heartbeat: renews a lease, takes back what lost consumers held, promotes what is due, wakes, tidies.
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
--   lenient:<consumer> STRING
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
--   consumer: whose lease
--   lease_ms: how long it holds from now
--   limit: most messages to take back, and most of each kind to promote and to tidy, at most 1000
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
-- RETURNS
--   an array of four: '1' when the lease was still there, '0' when it had been lost, '-1' when the
--   consumer is fenced out and nothing was done; the number of messages taken back; the number of the last
--   claim; µs until there may be something to take back: until the first lease of anybody runs out, below 0 when there
--   is more now, or until this consumer may take others for dead; '-' when nothing was to be taken back (limit 0, or
--   fenced out)
-- COST
--   some 20 commands, and those of a release per lost consumer
-- GUARANTEE
--   An expired lease whose messages nobody has taken back yet goes on as if it had not expired. One that was renewed
--   when less than 0.4 of it was left, here or by a claim, takes nothing back for one lease from then on. Settled
--   messages of a lost consumer are dropped, the others come back with one delivery counted; with the first one also
--   the turn.
--@include state
--@include full
--@include lease
--@include promote
--@include reap
--@include wake
local consumer, limit = ARGV[1], math.min(tonumber(ARGV[3]), 1000)
if is_fenced_out(consumer) then return {'-1', '0', string.format('%.0f', state.claim), '-'} end
local alive = call('ZSCORE', P .. 'leases', consumer)
renew_lease(consumer, alive, tonumber(ARGV[2]))
local lenient = lenient_for(consumer)
local reaped = lenient > 0 and 0 or reap(limit, tonumber(ARGV[4]))
promote(limit)
collect(P .. 'finish', text(state.v), limit)
collect(P .. 'limiter', now, limit)
collect(P .. 'tombstones', now, limit)
local next_end = '-'
if limit > 0 and lenient > 0 then
  next_end = text(lenient)
elseif limit > 0 then
  -- There is one: the lease renewed here.
  local first = call('ZRANGE', P .. 'leases', '0', '0', 'WITHSCORES')
  next_end = string.format('%.0f', tonumber(first[2]) - now)
end
wake()
save()
return {alive and '1' or '0', tostring(reaped), string.format('%.0f', state.claim), next_end}
