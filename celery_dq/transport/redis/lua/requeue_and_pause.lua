-- Requeues the message of a throttled task to its old place, and pauses its tenant.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
-- ARGV
--   consumer: the consumer that holds it
--   subject: 'tenant' pauses the tenant whose slot the message takes, 'message' lets the message alone wait
--   record: its record, of which the partition has none when it is settled
--   for_us: after which time from now the pause ends; 0 is no pause
--   cause: why, kept with the pause as it is
--   n: number of tags, 1
--   (claim, id)*: the tag
-- RETURNS
--   number of stale tags; DQINVALID for another subject, and when the record cannot be read or the pause cannot end then
-- COST
--   some 40 commands
-- GUARANTEE
--   A tag that is stale changes nothing. The message is stored and its tenant paused in one step, so no consumer gets it, or a
--   later message of its tenant, before the end. A pause that ends later, or never, stays as it is. The delivery does not
--   count. A message that waits alone is delayed until the end; on a singleton queue, it waits in its old place.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses pauses
--@uses in_flight
--@uses release
--@uses wake
local consumer, subject, record, length = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if subject ~= 'tenant' and subject ~= 'message' then
  return redis.error_reply('DQINVALID requeue_and_pause: subject must be tenant or message')
end
local priority, _, _, _, flags = dq.header(record)
if not priority then return redis.error_reply('DQINVALID requeue_and_pause: the record cannot be read') end
if not (length >= 0 and now + length < dq.WITHOUT_END) then
  return redis.error_reply('DQINVALID requeue_and_pause: the pause cannot end then')
end
local entries, stale = dq.read_tags(consumer, 6)
local entry = entries[1]
if not entry then return stale end
if length > 0 and subject == 'tenant' then
  dq.pause_tenant(entry.tenant, now + length, ARGV[5], true)
  dq.note_pause_ends()
elseif length > 0 then
  record = dq.with_header(record, priority, flags, math.min(now + length, dq.LATEST))
  entry.early = state.epoch == 0
end
-- A settled message has a mark in the place of its record.
call('HSET', P .. 'messages', entry.id, record)
entry.settled = false
dq.release_messages(consumer, entries, 'paused', 0, '')
state.released = state.released + 1
dq.wake()
save()
return 0
