-- Places tenants again, after a default quota has changed.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   none
-- ARGV
--   n: number of tenants, at most 1000
--   tenant*: their names
-- RETURNS
--   1
-- COST
--   some 20 commands, and one per tenant
-- GUARANTEE
--   Harmless at any time.
--@include state
--@include out_of_memory_guard
--@uses apply_quota
--@uses wake
local tenants, seen = {}, {}
for i = 1, tonumber(ARGV[1]) do
  local tenant = ARGV[i + 1]
  if not seen[tenant] then tenants[#tenants + 1] = tenant end
  seen[tenant] = true
end
if #tenants > 0 then
  dq.apply_quota(tenants)
  dq.wake()
  save()
end
return 1
