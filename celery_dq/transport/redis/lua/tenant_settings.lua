-- Stores or removes quotas and pauses that follow their tenants to other partitions.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   quotas HASH
--   quota_info HASH
--   pauses ZSET
--   pause_ends ZSET
--   pause_causes HASH
-- ARGV
--   map: the map by which they move, which this partition may not have yet
--   paused_since: the pause of the whole queue, as in the state; '' keeps the one that is stored
--   paused_until: its end, as in the state
--   (field, quota, info, since, end, cause)*: 't:<tenant>', 'default' or 'config', with the packed quota, its time and author, and
--     the begin and the end of the pause of the tenant, µs, and its cause; '' removes what is stored
-- RETURNS
--   1; 0 when this partition has a map of another change, or a later one, and nothing was changed
-- COST
--   some 20 commands, and seven per field, at most 200
-- GUARANTEE
--   A process that stood still for long changes nothing. No tenant is for a moment without its quota or its pause, and each is
--   placed by them. `default` and `config` act on tenants that are placed after that. It wakes no consumer: `place_held_back` does.
--@include state
--@include out_of_memory_guard
--@uses partition_map
--@uses apply_quota
--@uses quota
--@uses pauses
local map, stored, tenants = ARGV[1], dq.stored_map(), {}
if stored ~= map and dq.map_version(stored) >= dq.map_version(map) then return 0 end
local function put(key, field, value)
  if value == '' then call('HDEL', key, field) else call('HSET', key, field, value) end
end
local function rank(key, member, score)
  if score == '' then call('ZREM', key, member) else call('ZADD', key, score, member) end
end
for i = 4, #ARGV, 6 do
  local field, quota, info, since, ends, cause = unpack(ARGV, i, i + 5)
  local tenant = string.match(field, '^t:(.*)$')
  put(P .. 'quotas', field, quota)
  dq.note_bound(quota)
  put(P .. 'quota_info', field, info)
  if tenant then
    rank(P .. 'pauses', tenant, since)
    rank(P .. 'pause_ends', tenant, ends)
    put(P .. 'pause_causes', tenant, cause)
    tenants[#tenants + 1] = tenant
  end
end
if ARGV[2] ~= '' then
  state.paused_since, state.paused_until = tonumber(ARGV[2]), tonumber(ARGV[3])
end
dq.note_pause_ends()
if #tenants > 0 then dq.apply_quota(tenants) end
save()
return 1
