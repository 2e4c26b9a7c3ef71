-- The heartbeat: renews a lease, reaps the messages of lost consumers, promotes messages that are due, wakes, tidies,
-- and deletes dead letters that are kept no longer.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   finish_tags ZSET
--   limiter ZSET
--   leases ZSET
--   tombstones ZSET
--   messages HASH
--   delayed ZSET
--   dead HASH
--   unreadable HASH
-- ARGV
--   consumer: the consumer whose lease is renewed
--   lease_ms: how long it holds from now
--   limit: most messages to reap, and most of each kind to promote, to tidy and to delete, at most 1000
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
--   dead_age_ms: age after which a dead letter is deleted; 0 is never
--   dead_most: how many dead letters are kept, the latest ones; 0 is all
-- RETURNS
--   an array: '1' when the lease was still there, '0' when it had been lost, '-1' when the
--   consumer is fenced out and nothing was done; the number of reaped messages; the number of the last claim; µs until
--   there may be messages to reap: until the first lease of any consumer expires, below 0 when there are more now, or
--   until this consumer may reap others; '-' when it was not to reap (limit 0, or fenced out); the map of the queue, ''
--   when this partition has none stored; the number of entries that were set aside, because they could not be read; then
--   three strings per reaped message: the lost consumer, message id, '1' when it was settled, else '0'
-- COST
--   seven commands when the partition has no message, no dead letter and no lost consumer; else some 17, one per
--   consumer up to 100; five more where a lease has expired, and those of a release per lost consumer; four more with
--   delayed messages, tombstones or dead letters
-- GUARANTEE
--   An expired lease whose messages were not reaped yet goes on as if it had not expired. A consumer that renewed, here
--   or by a claim, when less than 0.4 of its lease was left reaps nothing for the next lease. Settled messages
--   of a lost consumer are dropped. The others are released with one delivery counted; after the first such delivery
--   their tenant also gets its turn back. The count of in-flight messages is right afterwards, even if a script failed
--   halfway before.
--@include partition
--@include clock
--@include out_of_memory_guard
--@include fencing
--@include lease
local consumer, limit = ARGV[1], math.min(tonumber(ARGV[3]), 1000)
local known = call('HMGET', KEYS[1], 'epoch', 'claim', 'held', 'v', 'evict', 'next_look_owner', 'resume_at', 'paused_until',
  'partitions', 'sets', 'clock')
local last_claim = pcall(sum, known[2]) and known[2] or '0'
if is_fenced_out(consumer, tonumber(known[1] or 0)) then return {'-1', '0', last_claim, '-', '', '0'} end
local alive = call('ZSCORE', P .. 'leases', consumer)
renew_lease(consumer, alive, tonumber(ARGV[2]))
-- Most partitions of a worker with many have no message at all, so nothing is to be reaped, promoted or served. There is
-- always a first lease: the one that was renewed above. Pauses that end and dead letters that grow old need the rest.
-- The includes that only the rest needs take longer than these commands.
local first = call('ZRANGE', P .. 'leases', '0', '0', 'WITHSCORES')[2] - now
local is_calm = (known[5] or '0') == '0' and (known[7] or '0') == '0' and (known[8] or '0') == '0'
if first > 0 and limit > 0 and is_calm
  and call('EXISTS', P .. 'messages', P .. 'finish_tags', P .. 'limiter', P .. 'tombstones', P .. 'dead', P .. 'unreadable') == 0 then
  if (known[3] or '0') ~= '0' or (known[6] or '') ~= '' then
    call('HSET', KEYS[1], 'held', '0', 'next_look_owner', '')
  end
  return {alive and '1' or '0', '0', last_claim, string.format('%.0f', first), known[9] or '', '0'}
end
--@include state
keep_state(known, 'epoch', 'claim', 'held', 'v', 'evict', 'next_look_owner', 'resume_at', 'paused_until', 'partitions',
  'sets', 'clock')
--@uses apply_quota
--@uses promote
--@uses reap
--@uses recount
--@uses dead_letter_retention
--@uses wake
local reaped, report = 0, {}
if first <= 0 then
  local grace = reap_grace_of(consumer)
  if grace > 0 then
    first = grace
  else
    reaped, report = dq.reap(limit, tonumber(ARGV[4]))
    -- Those that were reaped have no lease any more.
    first = tonumber(call('ZRANGE', P .. 'leases', '0', '0', 'WITHSCORES')[2]) - now
  end
end
local has_rare = call('EXISTS', P .. 'delayed', P .. 'tombstones', P .. 'dead') > 0
dq.promote(limit, has_rare)
if limit > 0 then dq.recount_held() end
collect(P .. 'finish_tags', state.v, limit)
collect(P .. 'limiter', now, limit)
if limit > 0 and dq.has_limits then
  -- After a failover to a host whose clock is behind, no tenant waits until the time of the old one. If there may be
  -- more, the next heartbeat goes on.
  local late = state.clock > now and call('ZREVRANGEBYSCORE', P .. 'limiter', '+inf', text(now), 'LIMIT', '0', text(limit)) or {}
  if not (#late > 0 and dq.apply_quota(late) and #late == limit) then state.clock = now end
end
if has_rare then
  collect(P .. 'tombstones', now, limit)
  dq.delete_old_dead_letters(limit, tonumber(ARGV[5]) * 1000, tonumber(ARGV[6]))
end
dq.wake()
-- A message on `woken` that was lost is repeated.
--@cluster if call('EXISTS', P .. 'wake') == 1 then
  --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
--@cluster end
save()
return {alive and '1' or '0', tostring(reaped), last_claim, limit > 0 and text(first) or '-', state.partitions,
  digits(call('HLEN', P .. 'unreadable')), unpack(report)}
