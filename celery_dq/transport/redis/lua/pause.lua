-- Pauses or resumes a tenant. Its quota is not changed.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   pauses ZSET
-- ARGV
--   tenant: the tenant
--   paused: '1' pauses, '0' resumes
-- RETURNS
--   1 when the tenant's state has changed, else 0
-- COST
--   some 20 commands
-- GUARANTEE
--   A tenant that is paused again keeps the time since when it is. In-flight messages are not changed.
--@include state
--@uses tenant_placement
--@uses wake
local tenant, paused = ARGV[1], ARGV[2]
local changed
if paused == '1' then
  changed = call('ZADD', P .. 'pauses', 'NX', now, tenant)
elseif paused == '0' then
  changed = call('ZREM', P .. 'pauses', tenant)
else
  return redis.error_reply('DQINVALID pause: paused must be 1 or 0')
end
dq.replace({tenant})
dq.wake()
save()
return changed
