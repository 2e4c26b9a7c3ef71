-- Turns the waiting messages of a tenant into discards, a chunk per call.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   tenant:<tenant> ZSET
--   dedup_members HASH
-- ARGV
--   tenant: the tenant of the messages
--   reason: the reason of the discards
--   limit: most messages to move, at most 200
-- RETURNS
--   an array of two: messages moved, messages left
-- COST
--   some 20 commands; ten more per message with a dedup key
-- GUARANTEE
--   Delayed and in-flight messages are not changed.
--@include state
--@include out_of_memory_guard
--@uses discard
--@uses dedup
--@uses tenant_placement
--@uses wake
local tenant = ARGV[1]
local key = P .. 'tenant:' .. tenant
dq.expand_singles({tenant})
local ids = call('ZRANGE', key, 0, math.min(tonumber(ARGV[3]), 200) - 1)
if #ids == 0 then return {'0', '0'} end
local found = {}
for i = 1, #ids do found[i] = {id = ids[i], tenant = tenant, reason = ARGV[2]} end
dq.add_discards(found)
if call('EXISTS', P .. 'dedup_members') == 1 then
  for i = 1, #ids do dq.dedup().leave(ids[i], false) end
end
call('ZREM', key, unpack(ids))
dq.replace({tenant})
dq.wake()
save()
return {tostring(#ids), tostring(call('ZCARD', key))}
