-- Why a tenant is or is not served. Changes nothing.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   running HASH
--   quotas HASH
--   tenant:<tenant> ZSET
--   sole HASH
-- ARGV
--   tenant: whose standing
-- RETURNS
--   an array of name, value, …: place ('turn', 'throttled', 'limited', 'parked', 'idle'), waiting, slots,
--   interval_us, burst, weight, concurrency, paused ('1', '0'), quota ('tenant', 'default', 'config', 'none'), now_us; in turn:
--   tag, v, ahead (tenants before it); throttled: due_us; when something waits: oldest (message id)
-- COST
--   some 12 commands
-- GUARANTEE
--   Reads only.
--@include state
--@include quota
--@include sole
local tenant = ARGV[1]
local quota = quotas_of({tenant})[1]
local key = P .. 'tenant:' .. tenant
local sole = soles_of({tenant})[1]
local waiting = sole and 1 or call('ZCARD', key)
local reply = {
  'place', 'idle', 'waiting', tostring(waiting), 'slots', call('HGET', P .. 'running', tenant) or '0',
  'interval_us', text(quota.interval), 'burst', text(quota.burst), 'weight', text(quota.weight),
  'concurrency', text(quota.concurrency), 'paused', quota.paused and '1' or '0', 'quota', quota.source,
  'now_us', text(now),
}
local function add(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = value
end
for _, place in ipairs({'turn', 'throttled', 'limited', 'parked'}) do
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
if waiting > 0 then add('oldest', sole and read_sole(sole) or call('ZRANGE', key, 0, 0)[1]) end
return reply
