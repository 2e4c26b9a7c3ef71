-- Fetches the first records of the next tenants in turn with one command, for when each is served once.
--
-- DERIVES
--   messages HASH
--@uses fair_turn
local turns = dq.turns
-- Tenants up to one turn behind `head` are looked at, at most `most` of them. A tenant's `record` is nil when it was
-- not fetched.
function dq.fetch_ahead(head, most)
  local tenants, ids = {}, {}
  local first = turns.next_unserved - 1
  turns.fetched = true
  for i = first, math.min(#turns.names, first + most - 1) do
    local tenant = dq.unserved_at(i)
    if tenant.tag > head.tag + head.cost then break end
    if dq.place_of(tenant.quota, tenant.slots, tenant.arrival) == 'turn' then
      if not tenant.single then
        tenant.ids = call('ZRANGE', tenant.key, '0', '1', 'WITHSCORES')
        tenant.ended = #tenant.ids < 4
      end
      if tenant.ids[1] then
        tenants[#tenants + 1] = tenant
        ids[#ids + 1] = tenant.ids[1]
      end
    end
  end
  if #ids == 0 then return end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  for i = 1, #tenants do tenants[i].record = records[i] end
end
