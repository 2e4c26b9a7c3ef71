-- Fences a singleton queue: only consumers with this fencing token may consume. Or ends the fence, and any consumer
-- without a token may consume. Releases the messages of all others, a chunk per call.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   leases ZSET
--   leader HASH
--   candidates ZSET
--   vacant LIST
-- ARGV
--   token: the fencing token of the term that begins, above 0; the present one may be sent again. 0 ends the fence
--   limit: most messages to release, at most 1000
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
-- RETURNS
--   an array of three: '1', or '0' when a higher token was here before, or when the fence was to end and a leader
--   lives, and nothing was changed; the epoch that holds now; the number of consumers whose messages the next call
--   will release
-- COST
--   that of a release per consumer
-- GUARANTEE
--   The epoch only grows: a term after the end of a fence needs a token above all earlier ones. From the first call
--   on, no other token claims, settles, finishes, releases or renews. A released message has its old place and counts
--   one delivery; settled messages are dropped. The end of a fence also ends the record of the last election.
--@include state
--@include out_of_memory_guard
--@include fencing
--@uses reap
--@uses leader_lease
--@uses wake
-- Returns whether the leader with this token has a living lease as a consumer, wherever its election is kept.
local function has_living_leader(epoch)
  local living = call('ZRANGEBYSCORE', P .. 'leases', string.format('(%.0f', now), '+inf')
  for i = 1, #living do
    if not is_fenced_out(living[i], epoch) then return true end
  end
  return false
end

local token, limit = tonumber(ARGV[1]), math.min(tonumber(ARGV[2]), 1000)
if not token or token < 0 or token ~= math.floor(token) then
  return redis.error_reply('DQINVALID fence: token must be a whole number, 0 or above')
end
read_state('epoch', 'last_epoch')
if token == 0 then
  if dq.has_leader_lease() or (state.epoch > 0 and has_living_leader(state.epoch)) then
    return {'0', text(state.epoch), '0'}
  end
  state.last_epoch, state.epoch, state.leader = math.max(state.epoch, state.last_epoch), 0, ''
  call('DEL', P .. 'leader', P .. 'candidates', P .. 'vacant')
elseif token < state.epoch or token <= state.last_epoch then
  return {'0', text(math.max(state.epoch, state.last_epoch)), '0'}
else
  state.epoch = token
end
-- Before the messages are released: Lua does not roll back.
save()
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
return {'1', text(token), text(left)}
