-- Gives tenants their turns back.
--
-- DERIVES
--   turn ZSET
--   finish_tags ZSET
--@include state
-- `charges` maps a tenant to the virtual time that it was charged for messages that wait again. The tenant's tag goes
-- back by that much, below virtual time if necessary. A start tag that is not above virtual time is set just below
-- it, so that the tenant goes before its equals: after its backlog was empty it is not known how long ago its turn
-- was. A tenant outside `turn` gets its finish tag back, but its next start tag is never below virtual time.
function dq.refund_permits(charges)
  local tenants = {}
  for tenant, charge in pairs(charges) do
    if charge > 0 then tenants[#tenants + 1] = tenant end
  end
  if #tenants == 0 then return end
  local starts = call('ZMSCORE', P .. 'turn', unpack(tenants))
  local tags = call('ZMSCORE', P .. 'finish_tags', unpack(tenants))
  -- Far more than the rounding error of the tags, and far less than a turn.
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
  write('ZADD', P .. 'finish_tags', finish)
end
