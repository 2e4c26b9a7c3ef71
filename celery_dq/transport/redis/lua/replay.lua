-- Sends a dead letter again, without its earlier deliveries.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
-- ARGV
--   id: its message id
--   record: the record to send; '' is the one that was kept
--   head_start_us: by how much each step of priority goes before its time
--   consumer: takes the new message, as `take` does, so that no worker gets it here; '' for none
--   lease_ms: how long the lease of the consumer holds from now
-- RETURNS
--   '1<message id>' of the new message; '0' when there is no such dead letter, or it is in the outbox
-- COST
--   some 20 commands, 40 with a consumer, and one look at each message of the outbox
-- GUARANTEE
--   The new message is stored before the dead letter is deleted. It runs even if its task has a tombstone.
--   A dead letter in the outbox stays: another partition may already have it, and would keep it.
--@include state
--@uses record
--@uses unique_ids
--@uses accept
--@uses outbox
--@uses take
--@uses wake
local id, record, consumer = ARGV[1], ARGV[2], ARGV[4]
local kept = call('HGET', P .. 'dead', id)
if not kept or dq.in_outbox()[id] then return '0' end
if record == '' then record = kept end
local priority, due, _, tenant = dq.header(record)
if not priority then return redis.error_reply('DQINVALID replay: the record cannot be read') end
state.head = tonumber(ARGV[3])
state.replayed = state.replayed + 1
-- The new message gets the id of the dead letter, unless another message has it.
local new = id
if call('HEXISTS', P .. 'messages', id) == 1 then new = dq.second_id(id) end
local is_ready = dq.accept({{id = new, record = record, priority = priority, due = due, tenant = dq.tenant_name(record, tenant)}})
call('HDEL', P .. 'dead', id)
call('HDEL', P .. 'dead_info', id)
call('ZREM', P .. 'dead_index', id)
if consumer ~= '' then
  dq.take({new}, consumer, tonumber(ARGV[5]))
  is_ready = false
end
dq.wake(is_ready)
save()
return '1' .. new
