-- Changes when a waiting or delayed message of a task is due, its priority, or its record.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   blocked ZSET
-- ARGV
--   id: the task id; the message ids '<id>~1' to '<id>~9' are looked at, too
--   due_us: when it is due, µs; '' leaves that as it is
--   for_us: after which time from now it is due, instead of due_us; '' leaves that as it is
--   priority: 0 to 9; '' leaves it as it is
--   record: its new record, with the same header and tenant; '' leaves it as it is
--   before: the record that the caller has read; another message than this is not changed. For a new record only
-- RETURNS
--   'waiting', 'delayed' or, only with a new record, 'blocked' (by a dedup lock) when the message was changed: its state
--   now; 'other' when the task is here in another state, or with another record,
--   'expires' when it expires before it would be due, and 'none' when it is not here: nothing was changed
-- COST
--   some 30 commands
-- GUARANTEE
--   The first message of the task that waits or is delayed is changed. With another priority it keeps its place by time
--   among the messages of that priority. A message that waits already, and is due at once, keeps its place.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses message_ids
--@uses tenant_placement
--@uses wake
local due, length, new_priority = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local new_record, before = ARGV[5], ARGV[6]
if length then due = now + length end
if due and not (due >= 0 and due <= dq.LATEST) then
  return redis.error_reply('DQINVALID edit: the message cannot be due then')
end
-- A time that is over gives no place ahead of messages that waited since.
if due then due = math.max(due, now) end
if new_priority and not (new_priority >= 0 and new_priority <= 9 and new_priority % 1 == 0) then
  return redis.error_reply('DQINVALID edit: the priority must be from 0 to 9')
end
local ids, reply = dq.ids_of(ARGV[1]), 'none'
local records = call('HMGET', P .. 'messages', unpack(ids))
for i = 1, #ids do
  local id, record = ids[i], records[i]
  local priority, old_due, expires, size, flags = dq.header(record)
  if record and reply == 'none' then reply = 'other' end
  if new_record ~= '' and record ~= before then priority = nil end
  local tenant = priority and dq.tenant_name(record, size)
  if tenant then dq.expand_singles({tenant}) end
  local score = tenant and call('ZSCORE', P .. 'tenant:' .. tenant, id)
  local at = tenant and not score and call('ZSCORE', P .. 'delayed', id)
  if new_record ~= '' and tenant then
    local is_blocked = not score and not at and call('ZSCORE', P .. 'blocked', id)
    if score or at or is_blocked then
      call('HSET', P .. 'messages', id, new_record)
      return score and 'waiting' or at and 'delayed' or 'blocked'
    end
  elseif score or at then
    local is_later = due and due > now
    if is_later and expires > 0 and due >= expires then return 'expires' end
    local new_due = due and (at or is_later) and due or old_due
    call('HSET', P .. 'messages', id, dq.with_header(record, new_priority or priority, flags, new_due))
    if at or is_later then
      if due then call('ZADD', P .. 'delayed', due, id) end
      if score then
        call('ZREM', P .. 'tenant:' .. tenant, id)
        dq.replace({tenant})
      end
    elseif new_priority then
      call('ZADD', P .. 'tenant:' .. tenant, tonumber(score) + (priority - new_priority) * state.head, id)
    end
    dq.wake()
    save()
    return (at or is_later) and 'delayed' or 'waiting'
  end
end
return reply
