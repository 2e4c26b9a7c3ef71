--@include state
--@include place
-- Stores new messages {id, record, priority, due, tenant, reason, score}: the records first, then where they wait. With
-- a reason a message becomes a discard; `blocked` ones wait aside for another one, `following` ones for a result.
-- With a score one takes that place, due or not.
local function accept(messages)
  local records, delayed, discards, reasons, blocked = {}, {}, {}, {}, {}
  local tenants, waiting = {}, {}
  for i = 1, #messages do
    local message = messages[i]
    records[2 * i - 1] = message.id
    records[2 * i] = message.record
    if message.reason then
      discards[#discards + 1] = next_seq()
      discards[#discards + 1] = message.id
      reasons[#reasons + 1] = message.id
      reasons[#reasons + 1] = message.reason
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
  write('HSET', P .. 'reasons', reasons)
  write('ZADD', P .. 'discards', discards)
  write('ZADD', P .. 'delayed', delayed)
  write('ZADD', P .. 'blocked', blocked)
  add_waiting(tenants, waiting)
end
