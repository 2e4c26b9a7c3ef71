-- The leases of consumers.
--
-- DERIVES
--   leases ZSET
--   reap_grace:<consumer> STRING
--@include clock
-- Renews a lease. When less than ALL_BUT_OVER of the old one is left, the server was away, its clock has jumped, or
-- the consumer stood still. Then other consumers may only be late, too, so this one reaps no other for one lease. The
-- server keeps that time, because delayed requests may arrive in any order. The share is the one at which a consumer
-- starts no more messages (`TRUSTED_SHARE` in `in_flight_messages.py`). A consumer with four heartbeats per lease
-- renews before that.
local function renew_lease(consumer, deadline, lease_ms)
  local ALL_BUT_OVER = 0.4
  local until_us = now + lease_ms * 1000
  if deadline and tonumber(deadline) - now < ALL_BUT_OVER * lease_ms * 1000 then
    call('SET', P .. 'reap_grace:' .. consumer, digits(until_us), 'PXAT', digits(math.ceil(until_us / 1000)))
  end
  call('ZADD', P .. 'leases', digits(until_us), consumer)
end

-- Returns the µs until this consumer may reap others; 0 is now.
local function reap_grace_of(consumer)
  return math.max((finite(call('GET', P .. 'reap_grace:' .. consumer)) or 0) - now, 0)
end
