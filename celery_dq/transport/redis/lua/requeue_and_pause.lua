-- Requeues the message of a throttled task to its old place, and pauses the tenants that its service does not serve for now.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
-- ARGV
--   consumer: the consumer that holds it
--   record: its record, of which the partition has none when it is settled
--   for_us: after which time from now the pause ends; 0 is no pause
--   cause: why, kept with the pause as it is
--   n: number of tags, 1
--   (claim, id)*: the tag
--   (tenant)*: the tenants to pause; none is the tenant whose slot the message takes
-- RETURNS
--   number of stale tags; DQINVALID when the record cannot be read or the pause cannot end then
-- COST
--   some 30 commands, and six per tenant
-- GUARANTEE
--   A tag that is stale changes nothing. The message is stored and its tenant paused in one step, so no consumer gets it, or a
--   later message of its tenant, before the end. A pause that ends later, or never, stays as it is. The delivery does not
--   count. When the tenant of the message is not among the tenants, the message itself waits until the end: on a singleton queue
--   in its old place, else as one that is delayed.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses pauses
--@uses in_flight
--@uses release
--@uses tenant_placement
--@uses wake
local consumer, record, length = ARGV[1], ARGV[2], tonumber(ARGV[3])
local priority, due, _, _, flags = dq.header(record)
if not priority then return redis.error_reply('DQINVALID requeue_and_pause: the record cannot be read') end
if not (length >= 0 and now + length < dq.WITHOUT_END) then
  return redis.error_reply('DQINVALID requeue_and_pause: the pause cannot end then')
end
local entries, stale = dq.read_tags(consumer, 5)
local entry = entries[1]
if not entry then return stale end
local tenants = {unpack(ARGV, 8)}
if #tenants == 0 then tenants[1] = entry.tenant end
local waits_alone = length > 0
for i = 1, #tenants do
  if length > 0 then dq.pause_tenant(tenants[i], now + length, ARGV[4], true) end
  if tenants[i] == entry.tenant then waits_alone = false end
end
if waits_alone then
  due = math.min(now + length, dq.LATEST)
  record = dq.with_header(record, priority, flags, due)
  entry.early = state.epoch == 0
end
-- A settled message has a mark in the place of its record.
call('HSET', P .. 'messages', entry.id, record)
entry.settled = false
dq.note_pause_ends()
dq.replace(tenants)
dq.release_messages(consumer, entries, 'paused', 0, '')
state.released = state.released + 1
dq.wake()
save()
return 0
