-- Decides anew where each of these tenants belongs, after a default changed.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   leases ZSET
--   wake LIST
--   tenant:<tenant> ZSET
--   sole HASH
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
--@include recap
--@include wake
local tenants, seen = {}, {}
for i = 1, tonumber(ARGV[1]) do
  local tenant = ARGV[i + 1]
  if not seen[tenant] then tenants[#tenants + 1] = tenant end
  seen[tenant] = true
end
if #tenants > 0 then
  recap(tenants)
  wake()
  save()
end
return 1
