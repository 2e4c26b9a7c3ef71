-- Serves tenants that have moved here from now on.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   arriving ZSET
--   arrived SET
--   limiter ZSET
-- ARGV
--   map: the map by which they move
--   all: '1' for all tenants, also those that come later: no other partition has messages of them
--   n: number of tenants, at most 500
--   (tenant, arrival_us)*: the tenants, and the theoretical arrival times of their rate limits
-- RETURNS
--   number of tenants that are still expected; -1 when this partition has another map, and nothing was changed
-- COST
--   some 20 commands, for at most 500 tenants
-- GUARANTEE
--   A tenant has no more permits than it had before the move. Only a tenant that is expected is changed.
--@include state
--@include out_of_memory_guard
--@uses partition_map
--@uses tenant_placement
--@uses wake
local map, n = ARGV[1], tonumber(ARGV[3])
if dq.stored_map() ~= map then return -1 end
if ARGV[2] == '1' then state.opened = dq.map_version(map) end
local tenants = ARGV[2] == '1' and call('ZRANGE', P .. 'arriving', 0, 499) or {}
for i = 1, n do
  local tenant, arrival = ARGV[2 + 2 * i], tonumber(ARGV[3 + 2 * i])
  if call('ZSCORE', P .. 'arriving', tenant) then
    tenants[#tenants + 1] = tenant
    if arrival > now then call('ZADD', P .. 'limiter', 'GT', digits(arrival), tenant) end
  end
end
if #tenants > 0 then
  call('SADD', P .. 'arrived', unpack(tenants))
  call('ZREM', P .. 'arriving', unpack(tenants))
  dq.replace(tenants)
end
dq.wake()
save()
return call('ZCARD', P .. 'arriving')
