-- Places tenants again, after a default quota has changed.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   resource_sets ZSET
-- ARGV
--   place: 'turn', 'resource_sets', 'throttled', 'at_concurrency' or 'paused': the tenants that are there; '' takes them by name
--   cursor: of the call before; '0' begins
--   most: the approximate number of tenants there, at most 1000
--   tenant*: the names of tenants, at most 1000
-- RETURNS
--   the cursor of the next call; '0' after the last one
-- COST
--   some 20 commands, and one per tenant
-- GUARANTEE
--   Harmless at any time. Each tenant that waits in a place from the first to the last call is placed again. A call wakes a
--   consumer, which does not wait for the last one.
--@include state
--@include out_of_memory_guard
--@uses apply_quota
--@uses wake
local place, cursor = ARGV[1], '0'
local tenants, seen = {}, {}
local function add(tenant)
  if not seen[tenant] then tenants[#tenants + 1] = tenant end
  seen[tenant] = true
end
for i = 4, #ARGV do add(ARGV[i]) end
if place ~= '' then
  local found
  cursor, found = unpack(call('ZSCAN', P .. place, ARGV[2], 'COUNT', ARGV[3]))
  for i = 1, #found, 2 do add(found[i]) end
end
if #tenants > 0 then
  dq.apply_quota(tenants)
  dq.wake()
  save()
end
return cursor
