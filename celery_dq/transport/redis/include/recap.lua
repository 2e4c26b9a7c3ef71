--@include state
--@include place
-- Brings changed quotas to tenants: their next token is not further away than the new burst allows, and they
-- stand where they belong.
local function recap(tenants)
  local quotas = quotas_of(tenants)
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
  replace(tenants)
end
