-- Takes named messages under a lease, to move them elsewhere. They may be waiting or delayed; their order is not
-- kept.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   running HASH
--   delayed ZSET
--   leases ZSET
-- ARGV
--   consumer: the consumer that takes them
--   lease_ms: how long the lease holds from now
--   n: number of message ids, at most 1000
--   id*: the message ids
-- RETURNS
--   three strings per message that was taken: message id, 'claim number|0|', record. A message that is in flight, a
--   discard or gone is left out.
-- COST
--   some 15 commands, and three per message
-- GUARANTEE
--   A message that was taken counts as running until it is finished or released, but takes no permit of its tenant's
--   rate, so release it with the mode 'requeue'. A delayed message that is released is delayed again. A message with a
--   dedup key counts as running there, too: a later message of its key waits behind it and does not replace it.
--@include state
--@include held_flags
--@uses record
--@uses delivery
--@uses wake
local consumer, n = ARGV[1], tonumber(ARGV[3])
local delivery = dq.delivery
local ids, named = {}, {}
for i = 1, n do
  local id = ARGV[3 + i]
  if not named[id] then ids[#ids + 1] = id end
  named[id] = true
end
if #ids == 0 or is_fenced_out(consumer, state.epoch) then return {} end

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
call('ZADD', P .. 'leases', now + tonumber(ARGV[2]) * 1000, consumer)
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
dq.wake()
save()
return delivery.reply
