-- The heartbeat: renews a lease, reaps the messages of lost consumers, promotes messages that are due, wakes, tidies.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   finish_tags ZSET
--   limiter ZSET
--   leases ZSET
--   tombstones ZSET
-- ARGV
--   consumer: the consumer whose lease is renewed
--   lease_ms: how long it holds from now
--   limit: most messages to reap, and most of each kind to promote and to tidy, at most 1000
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
-- RETURNS
--   an array: '1' when the lease was still there, '0' when it had been lost, '-1' when the
--   consumer is fenced out and nothing was done; the number of reaped messages; the number of the last claim; µs until
--   there may be messages to reap: until the first lease of any consumer expires, below 0 when there are more now, or
--   until this consumer may reap others; '-' when it was not to reap (limit 0, or fenced out); then three strings per
--   reaped message: the lost consumer, message id, '1' when it was settled, else '0'
-- COST
--   some 20 commands, one per consumer up to 100, and those of a release per lost consumer
-- GUARANTEE
--   An expired lease whose messages were not reaped yet goes on as if it had not expired. A consumer that renewed, here
--   or by a claim, when less than 0.4 of its lease was left reaps nothing for one lease from then on. Settled messages
--   of a lost consumer are dropped. The others are released with one delivery counted; after the first such delivery
--   their tenant also gets its turn back. The count of in-flight messages is right afterwards, even if a script failed
--   halfway before.
--@include state
--@include out_of_memory_guard
--@include lease
--@uses promote
--@uses reap
--@uses recount
--@uses wake
--@ready wake next_due
read_state('epoch', 'claim', 'held', 'v', 'evict')
local consumer, limit = ARGV[1], math.min(tonumber(ARGV[3]), 1000)
if is_fenced_out(consumer, state.epoch) then return {'-1', '0', string.format('%.0f', state.claim), '-'} end
local alive = call('ZSCORE', P .. 'leases', consumer)
renew_lease(consumer, alive, tonumber(ARGV[2]))
local grace = reap_grace_of(consumer)
local reaped, report = 0, {}
if grace == 0 then reaped, report = dq.reap(limit, tonumber(ARGV[4])) end
dq.promote(limit)
if limit > 0 then dq.recount_held() end
collect(P .. 'finish_tags', text(state.v), limit)
collect(P .. 'limiter', now, limit)
collect(P .. 'tombstones', now, limit)
local next_end = '-'
if limit > 0 and grace > 0 then
  next_end = text(grace)
elseif limit > 0 then
  -- There is always a lease: the one that was renewed above.
  local first = call('ZRANGE', P .. 'leases', '0', '0', 'WITHSCORES')
  next_end = string.format('%.0f', tonumber(first[2]) - now)
end
dq.wake()
save()
return {alive and '1' or '0', tostring(reaped), string.format('%.0f', state.claim), next_end, unpack(report)}
