-- Pauses or resumes a tenant or the whole queue. A pause may end by itself. Quotas are not changed.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   pauses ZSET
--   pause_ends ZSET
--   pause_causes HASH
-- ARGV
--   kind: 'tenant' or 'queue'
--   tenant: the tenant; '' for the whole queue
--   paused: '1' pauses, '0' resumes; 'extend' pauses a tenant, unless a pause ends later or never
--   until_us: when the pause ends, by the clock of the server; 0 is never
--   for_us: after which time from now it ends, instead of until_us; 0 is never
--   map: the map of the queue by which the client chose this partition
--   cause: why the tenant is paused, kept as it is; '' is none
-- RETURNS
--   DQINVALID when the end is below 0 or after the year 2255; else an array of three: '1' when a pause has begun, changed its end or ended, '0' when nothing was changed, '-1' when
--   until_us is over already, '-2' when this partition has another map, and nothing was changed; when the pause began, µs, or '0' without one; when it ends, µs, or '0' for never
-- COST
--   some 20 commands
-- GUARANTEE
--   A tenant or queue that is paused again keeps the time since when it is. In-flight messages are not changed, and
--   discards are delivered during a pause. A pause of the queue and those of its tenants do not touch each other.
--@include state
--@include out_of_memory_guard
--@uses partition_map
--@uses pauses
--@uses tenant_placement
--@uses wake
local kind, tenant, paused = ARGV[1], ARGV[2], ARGV[3]
local extends = kind == 'tenant' and paused == 'extend'
if (kind ~= 'tenant' and kind ~= 'queue') or (paused ~= '1' and paused ~= '0' and not extends) then
  return redis.error_reply('DQINVALID pause: kind must be tenant or queue, and paused 1, 0, or extend for a tenant')
end
if dq.stored_map() ~= ARGV[6] then return {'-2', '0', '0'} end
local ends, length = tonumber(ARGV[4]), tonumber(ARGV[5])
if length > 0 then ends = now + length end
if not (ends >= 0 and length >= 0 and ends < dq.WITHOUT_END) then
  return redis.error_reply('DQINVALID pause: the pause cannot end then')
end
if paused ~= '0' and ends > 0 and ends <= now then return {'-1', '0', '0'} end
local is_changed, since = false, 0
if kind == 'queue' then
  local before = state.paused_until
  if paused == '0' then
    is_changed = before > now
    state.paused_until = 0
  else
    if before <= now then state.paused_since = now end
    since = state.paused_since
    state.paused_until = ends > 0 and ends or dq.WITHOUT_END
    is_changed = state.paused_until ~= before
  end
elseif paused ~= '0' then
  is_changed, since, ends = dq.pause_tenant(tenant, ends, ARGV[7], extends)
else
  local over = tonumber(call('ZSCORE', P .. 'pause_ends', tenant) or 0)
  is_changed = call('ZREM', P .. 'pauses', tenant) == 1 and (over == 0 or over > now)
  call('ZREM', P .. 'pause_ends', tenant)
  call('HDEL', P .. 'pause_causes', tenant)
end
if kind == 'tenant' then
  dq.note_pause_ends()
  dq.replace({tenant})
end
dq.wake()
save()
return {is_changed and '1' or '0', text(since), paused ~= '0' and text(ends) or '0'}
