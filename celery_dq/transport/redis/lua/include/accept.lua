-- Stores new messages.
--
-- DERIVES
--   messages HASH
--   delayed ZSET
--   blocked ZSET
--@include state
--@uses tenant_placement
--@uses discard
-- Stores messages {id, record, priority, due, tenant, reason, score}: the records first, then the places where they
-- wait. A message with a reason becomes a discard. A `blocked` message waits behind the lock of its dedup key, a
-- `following` one for the result of another message. A message with a score waits under it, even if it is not due.
-- Returns whether one of them may be served for sure.
function dq.accept(messages)
  local records, delayed, discards, blocked = {}, {}, {}, {}
  local tenants, waiting = {}, {}
  for i = 1, #messages do
    local message = messages[i]
    records[2 * i - 1] = message.id
    records[2 * i] = message.record
    if message.reason then
      discards[#discards + 1] = message
    elseif message.blocked then
      blocked[#blocked + 1] = next_seq() - message.priority * state.head
      blocked[#blocked + 1] = message.id
    elseif not message.following and message.due > now and not message.score then
      delayed[#delayed + 1] = message.due
      delayed[#delayed + 1] = message.id
    elseif not message.following then
      local list = waiting[message.tenant]
      if not list then
        list = {}
        waiting[message.tenant] = list
        tenants[#tenants + 1] = message.tenant
      end
      list[#list + 1] = message.score or next_seq() - message.priority * state.head
      list[#list + 1] = message.id
    end
  end
  write('HSET', P .. 'messages', records)
  if #discards > 0 then dq.add_discards(discards) end
  write('ZADD', P .. 'delayed', delayed)
  write('ZADD', P .. 'blocked', blocked)
  return dq.add_waiting(tenants, waiting)
end
