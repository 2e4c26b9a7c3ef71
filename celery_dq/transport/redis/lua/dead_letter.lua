-- Finishes a message and keeps it as a dead letter.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   deliveries HASH
--   held:<consumer> HASH
-- ARGV
--   consumer: the consumer that holds it
--   claim: the claim number of its tag
--   id: the message id of its tag
--   reason: why it is given up on
--   worker: the worker that gives up on it
--   record: the record to keep; '' is the stored record
-- RETURNS
--   1 done; 0 the tag is stale; -1 a settled message has no stored record: nothing was changed
-- COST
--   some 20 commands
-- GUARANTEE
--   The dead letter is written before the message is deleted.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses dead_letter
--@uses in_flight
--@uses wake
local consumer, id = ARGV[1], ARGV[3]
local entry = not is_fenced_out(consumer, state.epoch) and call('HGET', P .. 'held:' .. consumer, id)
entry = entry and dq.read_held(id, entry)
if not entry or entry.claim ~= tonumber(ARGV[2]) then return 0 end
local record = ARGV[6]
if record == '' then
  record = call('HGET', P .. 'messages', id)
  if not record or dq.is_settled_mark(record) then return -1 end
end
-- The slot may be one of a resource, and the message one of a set.
local length = select(4, dq.header(record))
local tenant = length and dq.tenant_name(record, length) or entry.tenant
dq.store_dead_letter(id, record, ARGV[4], ARGV[5], finite(call('HGET', P .. 'deliveries', id)) or 0, tenant)
dq.erase(consumer, {entry})
if entry.discard then count_discards(1) end
dq.end_finish(0, dq.free_slots({entry}), {}, entry.settled and 1 or 0)
dq.wake()
save()
return 1
