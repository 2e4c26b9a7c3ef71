--@include state
-- Renews a lease. One that is all but over, or over, tells that the server was away, its clock has jumped, or the
-- consumer stood still: others may be on their way back as it is. So it takes nobody for dead for one lease, and that
-- is noted here, for requests that have piled up meanwhile may be served in any order. The share is that which is left
-- when nothing new may start any more (TRUST in ledger.py); whoever beats four times per lease still has his then.
local ALL_BUT_OVER = 0.4

local function renew_lease(consumer, deadline, lease_ms)
  local till = now + lease_ms * 1000
  if deadline and tonumber(deadline) - now < ALL_BUT_OVER * lease_ms * 1000 then
    call('SET', P .. 'lenient:' .. consumer, text(till), 'PXAT', text(math.ceil(till / 1000)))
  end
  call('ZADD', P .. 'leases', till, consumer)
end

-- µs until this consumer may take others for dead; 0 is now.
local function lenient_for(consumer)
  return math.max(tonumber(call('GET', P .. 'lenient:' .. consumer) or 0) - now, 0)
end
