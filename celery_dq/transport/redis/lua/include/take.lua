-- Takes named messages under a lease.
--
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   running HASH
--   delayed ZSET
--   leases ZSET
--@include state
--@include held_flags
--@uses record
--@uses delivery
-- Takes those of these messages, each named once, that wait or are delayed. Returns the strings of the reply of `take`.
function dq.take(ids, consumer, lease_ms)
  if #ids == 0 or is_fenced_out(consumer, state.epoch) then return {} end
  local delivery = dq.delivery
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local delayed, tenants, names, more = {}, {}, {}, {}
  for i = 1, #ids do
    local id, record = ids[i], records[i]
    local priority, due, _, length = dq.header(record)
    local tenant = priority and dq.tenant_name(record, length)
    if priority then dq.expand_singles({tenant}) end
    local score, flags = priority and call('ZSCORE', P .. 'tenant:' .. tenant, id), 0
    if priority and not score and call('ZSCORE', P .. 'delayed', id) then
      delayed[#delayed + 1] = id
      score, flags = due - priority * state.head, EARLY
    end
    if score then
      dq.deliver(id, tonumber(score), flags, 0, tenant, '0', '', record)
      if not more[tenant] then
        more[tenant] = {}
        names[#names + 1] = tenant
      end
      tenants[tenant] = (tenants[tenant] or 0) + 1
      more[tenant][#more[tenant] + 1] = id
    end
  end
  if delivery.count == 0 then return {} end

  -- The messages are written under the consumer's name before they are removed from where they waited.
  state.claim = delivery.number
  state.held = state.held + delivery.count
  dq.count_waits()
  call('ZADD', P .. 'leases', now + lease_ms * 1000, consumer)
  dq.write_delivered(consumer)
  for i = 1, #names do
    local entry = call('HGET', P .. 'running', names[i])
    local slots = slots_of(entry) + tenants[names[i]]
    local is_counted = entry and #entry == COUNTED
    call('HSET', P .. 'running', names[i], is_counted and struct.pack('>d', slots) .. string.sub(entry, 9) or text(slots))
    call('ZREM', P .. 'tenant:' .. names[i], unpack(more[names[i]]))
  end
  write('ZREM', P .. 'delayed', delayed)
  if #delivery.started > 0 then dq.fast_dedup().start(delivery.started, delivery.number) end
  dq.replace(names)
  return delivery.reply
end
