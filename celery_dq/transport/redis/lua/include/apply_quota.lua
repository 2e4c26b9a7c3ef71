-- Applies changed quotas.
--
-- DERIVES
--   limiter ZSET
--@include state
--@uses tenant_placement
-- No tenant waits longer for its next message than its new burst allows, and each is placed where it belongs. Returns
-- whether one would have waited longer.
function dq.apply_quota(tenants)
  local quotas = dq.quotas_of(tenants)
  local arrivals = call('ZMSCORE', P .. 'limiter', unpack(tenants))
  local sooner, none = {}, {}
  for i = 1, #tenants do
    if arrivals[i] then
      local most = now + quotas[i].burst * quotas[i].interval
      if most <= now then
        none[#none + 1] = tenants[i]
      elseif tonumber(arrivals[i]) > most then
        sooner[#sooner + 1] = most
        sooner[#sooner + 1] = tenants[i]
      end
    end
  end
  write('ZADD', P .. 'limiter', sooner)
  write('ZREM', P .. 'limiter', none)
  dq.replace(tenants)
  return #sooner + #none > 0
end
