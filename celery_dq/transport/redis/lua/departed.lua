-- Says which tenants have left this partition: none of their messages waits, runs, or lies in the outbox.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   running HASH
--   limiter ZSET
--   outbox LIST
-- ARGV
--   n: number of tenants, at most 500
--   tenant*: the tenants
-- RETURNS
--   a string per tenant: '' when it has not left; else the theoretical arrival time of its rate limit, µs, or '0'
-- COST
--   four commands, and one per tenant
-- GUARANTEE
--   Reads only. Delayed messages are not looked at.
--@include state
--@uses tenant_placement
local tenants = {}
for i = 1, tonumber(ARGV[1]) do tenants[i] = ARGV[1 + i] end
local backlog, moving = dq.with_backlog(tenants), call('LINDEX', P .. 'outbox', 1)
local slots, arrivals = call('HMGET', P .. 'running', unpack(tenants)), call('ZMSCORE', P .. 'limiter', unpack(tenants))
local reply = {}
for i = 1, #tenants do
  local has_left = not backlog[tenants[i]] and not slots[i] and moving ~= tenants[i]
  reply[i] = has_left and (arrivals[i] or '0') or ''
end
return reply
