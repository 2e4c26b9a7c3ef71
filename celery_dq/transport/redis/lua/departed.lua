-- Says which tenants have left this partition: none of their messages waits, runs, or lies in the outbox. A spread tenant
-- that keeps a share here has made room when no more of its messages run than this share allows.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   running HASH
--   limiter ZSET
--   outbox LIST
-- ARGV
--   n: number of tenants, at most 500
--   (tenant, stays)*: the tenants, and '1' for one that keeps a share here, else '0'
-- RETURNS
--   a string per tenant: '' when it has not left; else the theoretical arrival time of its rate limit, µs, or '0'
-- COST
--   four commands, and one per tenant
-- GUARANTEE
--   Reads only. Delayed messages are not looked at, and of a tenant that stays, neither are those that wait.
--@include state
--@include running
--@uses quota
--@uses tenant_placement
local tenants, stays = {}, {}
for i = 1, tonumber(ARGV[1]) do
  tenants[i], stays[i] = ARGV[2 * i], ARGV[2 * i + 1] == '1'
end
local backlog, moving = dq.with_backlog(tenants), call('LINDEX', P .. 'outbox', 1)
local slots, arrivals = call('HMGET', P .. 'running', unpack(tenants)), call('ZMSCORE', P .. 'limiter', unpack(tenants))
local quotas, reply = dq.quotas_of(tenants), {}
for i = 1, #tenants do
  local has_left
  if stays[i] then
    has_left = quotas[i].concurrency == 0 or slots_of(slots[i]) <= quotas[i].concurrency
  else
    has_left = not backlog[tenants[i]] and slots_of(slots[i]) == 0
  end
  reply[i] = has_left and moving ~= tenants[i] and (arrivals[i] or '0') or ''
end
return reply
