-- Sets or deletes a quota. That of a tenant acts on its backlog at once.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   quotas HASH
--   quota_info HASH
-- ARGV
--   field: 't:<tenant>', or 'default'
--   packed: the quota, or '' to delete it
--   by: the user who sets it
--   map: the map of the queue by which the client chose this partition
--   divided: the packed quota of which this one is another division, with its time and author; '' for a quota of its own
-- RETURNS
--   1; 0 when this partition has another map, or another quota than the divided one, and nothing was changed
-- COST
--   some 20 commands
-- GUARANTEE
--   A tenant never waits longer for its next message than its new burst allows. A bound of the backlog acts on the next
--   push; a lower one removes no message here. `default` acts on tenants that are placed after that; `place` applies it to
--   tenants with backlog. No share of an old map replaces one of a newer map.
--@include state
--@include out_of_memory_guard
--@uses partition_map
--@uses apply_quota
--@uses quota
--@uses wake
local field, packed = ARGV[1], ARGV[2]
local tenant = string.match(field, '^t:(.*)$')
if not (tenant or field == 'default') then
  return redis.error_reply('DQINVALID quota: the field must be default or t:<tenant>')
end
if dq.stored_map() ~= ARGV[4] then return 0 end
if ARGV[5] ~= '' and call('HGET', P .. 'quotas', field) ~= ARGV[5] then return 0 end
if packed == '' then
  call('HDEL', P .. 'quotas', field)
  call('HDEL', P .. 'quota_info', field)
elseif read_quota(packed, field) then
  call('HSET', P .. 'quotas', field, packed)
  dq.note_bound(packed)
  if ARGV[5] == '' then call('HSET', P .. 'quota_info', field, text(now) .. ' ' .. ARGV[3]) end
else
  return redis.error_reply('DQINVALID quota: the packed quota cannot be read')
end
if tenant then
  dq.apply_quota({tenant})
  dq.wake()
end
save()
return 1
