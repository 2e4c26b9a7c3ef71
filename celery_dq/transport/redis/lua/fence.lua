-- Fences a singleton queue: only consumers with this fencing token may consume. Releases the messages of all others,
-- a chunk per call.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   leases ZSET
-- ARGV
--   token: the fencing token of the term that begins, above 0; the present one may be sent again
--   limit: most messages to release, at most 1000
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
-- RETURNS
--   an array of three: '1', or '0' when a higher token was here before and nothing was changed; the epoch that holds
--   now; the number of consumers whose messages the next call will release
-- COST
--   that of a release per consumer
-- GUARANTEE
--   The epoch only grows. From the first call on, no other token claims, settles, finishes, releases or renews. A
--   released message has its old place and counts one delivery; settled messages are dropped.
--@include state
--@include out_of_memory_guard
--@include fencing
--@uses reap
--@uses wake
local token, limit = tonumber(ARGV[1]), math.min(tonumber(ARGV[2]), 1000)
if not token or token < 1 or token ~= math.floor(token) then
  return redis.error_reply('DQINVALID fence: token must be a whole number above 0')
end
if token < state.epoch then return {'0', string.format('%.0f', state.epoch), '0'} end
state.epoch = token
call('HSET', KEYS[1], 'epoch', token)
local others = call('ZRANGEBYSCORE', P .. 'leases', string.format('(%.0f', now), '+inf', 'LIMIT', 0, limit)
local lost = {}
for i = 1, #others do
  if is_fenced_out(others[i], state.epoch) then
    -- Not 0, which marks a consumer that was renamed while it was reaped.
    lost[#lost + 1] = 1
    lost[#lost + 1] = others[i]
  end
end
write('ZADD', P .. 'leases', lost)
dq.reap(limit, tonumber(ARGV[3]))
local left = call('ZCOUNT', P .. 'leases', '-inf', now)
dq.wake()
save()
return {'1', string.format('%.0f', token), string.format('%.0f', left)}
