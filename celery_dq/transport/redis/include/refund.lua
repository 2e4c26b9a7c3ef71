--@include state
-- Gives tenants their turns back, tenant -> what they were charged for what waits again: their tags go back by that
-- much, below virtual time if need be, until they were served as often. Among equals they are first: of a tenant
-- that had nothing left it is not known how long ago its turn was. One that is out of `turn` enters later
-- than it would have, by what it had beyond virtual time at most: before that is no credit.
local function refund(charges)
  local tenants = {}
  for tenant, charge in pairs(charges) do
    if charge > 0 then tenants[#tenants + 1] = tenant end
  end
  if #tenants == 0 then return end
  local starts = call('ZMSCORE', P .. 'turn', unpack(tenants))
  local tags = call('ZMSCORE', P .. 'finish', unpack(tenants))
  -- Sums of fractions are not exact; this is far more than they are off, and far less than a turn.
  local near = math.max(1, state.v) * 2 ^ -50
  local turn, finish = {}, {}
  for i = 1, #tenants do
    local tenant = tenants[i]
    local list = starts[i] and turn or finish
    local tag = tonumber(starts[i] or tags[i] or 0) - charges[tenant]
    if starts[i] and tag < state.v + near then tag = math.min(tag, state.v - near) end
    if starts[i] or tags[i] then
      list[#list + 1] = text(tag)
      list[#list + 1] = tenant
    end
  end
  write('ZADD', P .. 'turn', turn)
  write('ZADD', P .. 'finish', finish)
end
