-- Explains why a tenant is or is not served. Changes nothing.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   tenant:<tenant> ZSET
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   resource_sets ZSET
--   running HASH
--   discards ZSET
-- ARGV
--   tenant: the tenant
-- RETURNS
--   an array of name, value, …: place ('turn', 'throttled', 'at_concurrency', 'paused', 'resource_sets', 'idle'),
--   waiting, slots, interval_us, burst, weight, concurrency, paused ('1', '0'), quota ('tenant', 'default', 'config', 'none'), now_us,
--   discards (messages of any tenant that will not run and are still to be recorded); in turn: tag, v, ahead (tenants
--   before it); throttled: due_us; with backlog: oldest (message id)
-- COST
--   some 12 commands
-- GUARANTEE
--   Reads only.
--@include state
--@include running
--@uses quota
--@uses single_message
local tenant = ARGV[1]
local quota = dq.quotas_of({tenant})[1]
local key = P .. 'tenant:' .. tenant
local single = dq.singles_of({tenant})[1]
local waiting = single and 1 or call('ZCARD', key)
local reply = {
  'place', 'idle', 'waiting', tostring(waiting), 'slots', text(slots_of(call('HGET', P .. 'running', tenant))),
  'interval_us', text(quota.interval), 'burst', text(quota.burst), 'weight', text(quota.weight),
  'concurrency', text(quota.concurrency), 'paused', quota.paused and '1' or '0', 'quota', quota.source,
  'now_us', text(now), 'discards', tostring(call('ZCARD', P .. 'discards')),
}
local function add(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = value
end
for _, place in ipairs({'turn', 'throttled', 'at_concurrency', 'paused', 'resource_sets'}) do
  local score = call('ZSCORE', P .. place, tenant)
  if score then
    reply[2] = place
    if place == 'turn' then
      add('tag', score)
      add('v', text(state.v))
      add('ahead', tostring(call('ZRANK', P .. 'turn', tenant)))
    elseif place == 'throttled' then
      add('due_us', text(tonumber(score)))
    end
  end
end
if waiting > 0 then add('oldest', single and dq.read_single(single) or call('ZRANGE', key, 0, 0)[1]) end
return reply
