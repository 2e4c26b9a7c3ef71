-- Applies the quota of a worker's settings, unless another one has replaced it a short while ago: then the worker's
-- settings are older than those in force.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   quotas HASH
--   quota_info HASH
--   config_before ZSET
-- ARGV
--   packed: the quota; '' when the settings have none
--   by: the worker that applies it
--   memory_ms: for how long a replaced quota is refused
--   force: '1' applies it even then, else '0'
--   map: the map of the queue by which the client knows this partition
-- RETURNS
--   an array of four: 'set', 'same' (it was in force), 'older' (nothing was changed) or 'moved' (this partition has
--   another map, and nothing was changed); the packed quota that was in
--   force before, or ''; the worker that had applied it, or ''; when, µs, or '0'
-- COST
--   some 8 commands
-- GUARANTEE
--   Tenants' own quotas and the default that was set live are not changed. It acts on tenants that are placed from then
--   on; `place` applies it to tenants with backlog.
--@include state
--@uses quota
--@uses partition_map
local packed, by, memory = ARGV[1], ARGV[2], tonumber(ARGV[3]) * 1000
if packed ~= '' and not read_quota(packed, 'config') then
  return redis.error_reply('DQINVALID settings_quota: the packed quota cannot be read')
end
local current = call('HGET', P .. 'quotas', 'config') or ''
local at, author = string.match(call('HGET', P .. 'quota_info', 'config') or '', '^(%d+) (.*)$')
local reply = {'same', current, author or '', at or '0'}
if dq.stored_map() ~= ARGV[5] then
  reply[1] = 'moved'
  return reply
end
if packed == current then return reply end
local replaced = tonumber(call('ZSCORE', P .. 'config_before', packed) or nil)
if ARGV[4] ~= '1' and replaced and replaced + memory > now then
  reply[1] = 'older'
  return reply
end
reply[1] = 'set'
call('ZREM', P .. 'config_before', packed)
call('ZADD', P .. 'config_before', now, current)
call('PEXPIRE', P .. 'config_before', ARGV[3])
call('HSET', P .. 'quota_info', 'config', text(now) .. ' ' .. by)
if packed == '' then
  call('HDEL', P .. 'quotas', 'config')
else
  call('HSET', P .. 'quotas', 'config', packed)
  dq.note_bound(packed)
  save()
end
return reply
