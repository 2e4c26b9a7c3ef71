-- Takes messages that are named under a lease, to move them elsewhere: waiting or delayed ones, out of order.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   wake LIST
--   tenant:<tenant> ZSET
--   sole HASH
--   held:<consumer> HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   consumer: who takes them
--   lease_ms: how long the lease holds from now
--   n: number of message ids, at most 1000
--   id*: the message ids
-- RETURNS
--   three strings per message that was taken: message id, 'claim number|0|', record. One that is held, discarded
--   or gone is left out.
-- COST
--   some 15 commands, and three per message
-- GUARANTEE
--   What is taken counts as running until it is finished or released, but takes no token of its tenant's rate, so
--   release it with the mode 'requeue'. A delayed one that is released is delayed again. A key's message runs, so
--   that a later one of its key waits behind it and does not take its place.
--@include state
--@include record
--@include held
--@include wake
local consumer, n = ARGV[1], tonumber(ARGV[3])
local ids, named = {}, {}
for i = 1, n do
  local id = ARGV[3 + i]
  if not named[id] then ids[#ids + 1] = id end
  named[id] = true
end
local reply = {}
if #ids == 0 or is_fenced_out(consumer) then return reply end

local records = call('HMGET', P .. 'messages', unpack(ids))
local claim = state.claim + 1
local held, delayed, tenants, names, more, started = {}, {}, {}, {}, {}, {}
for i = 1, #ids do
  local id, record = ids[i], records[i]
  local priority, due, _, length = header(record)
  local tenant = priority and tenant_name(record, length)
  if priority then unfold({tenant}) end
  local score, flags = priority and call('ZSCORE', P .. 'tenant:' .. tenant, id), 0
  if priority and not score and call('ZSCORE', P .. 'delayed', id) then
    delayed[#delayed + 1] = id
    score, flags = due - priority * state.head, EARLY
  end
  if score then
    held[#held + 1] = id
    if is_keyed(record) then
      flags = flags + KEYED
      started[#started + 1] = {id = id, record = record, tenant = tenant}
    end
    held[#held + 1] = pack_held(claim, tonumber(score), now, flags, 0, tenant)
    if not more[tenant] then
      more[tenant] = {}
      names[#names + 1] = tenant
    end
    tenants[tenant] = (tenants[tenant] or 0) + 1
    more[tenant][#more[tenant] + 1] = id
    reply[#reply + 1] = id
    reply[#reply + 1] = string.format('%.0f|0|', claim)
    reply[#reply + 1] = record
  end
end
if #reply == 0 then return reply end

-- Written under the consumer's name before it is removed from where it waited.
state.claim = claim
state.held = state.held + #reply / 3
call('ZADD', P .. 'leases', now + tonumber(ARGV[2]) * 1000, consumer)
write('HSET', P .. 'held:' .. consumer, held)
for i = 1, #names do
  call('HINCRBY', P .. 'running', names[i], tenants[names[i]])
  call('ZREM', P .. 'tenant:' .. names[i], unpack(more[names[i]]))
end
write('ZREM', P .. 'delayed', delayed)
if #started > 0 then keyed().start(started, claim) end
replace(names)
wake()
save()
return reply
