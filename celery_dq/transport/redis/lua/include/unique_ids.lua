-- Ids for new messages.
--
-- DERIVES
--   messages HASH
--   dead HASH
--@include state
--@uses message_ids
-- Returns a message id for a task whose first one is taken.
function dq.second_id(id, used)
  local base = dq.base_id(id)
  local ids = {}
  for i = 1, 9 do ids[i] = base .. '~' .. i end
  local living, dead = call('HMGET', P .. 'messages', unpack(ids)), call('HMGET', P .. 'dead', unpack(ids))
  for i = 1, 9 do
    if not (living[i] or dead[i] or used and used[ids[i]]) then return ids[i] end
  end
  return base .. '~' .. string.format('%.0f', next_seq())
end

-- Returns message ids for these task ids that no message, no dead letter and no other message of this call has.
-- `has_dead`: there may be dead letters.
function dq.unique_ids(task_ids, has_dead)
  local ids, used = {}, {}
  for i = 1, #task_ids do ids[i] = dq.plain_id(task_ids[i]) end
  local living = call('HMGET', P .. 'messages', unpack(ids))
  local dead = has_dead and call('HMGET', P .. 'dead', unpack(ids)) or {}
  for i = 1, #ids do
    if living[i] or dead[i] or used[ids[i]] then ids[i] = dq.second_id(ids[i], used) end
    used[ids[i]] = true
  end
  return ids
end
