--@include state
--@include ids
-- A message id for a task whose plain one is taken.
local function second_id(id, used)
  local base = base_id(id)
  local ids = {}
  for i = 1, 9 do ids[i] = base .. '~' .. i end
  local living, dead = call('HMGET', P .. 'messages', unpack(ids)), call('HMGET', P .. 'dead', unpack(ids))
  for i = 1, 9 do
    if not (living[i] or dead[i] or used and used[ids[i]]) then return ids[i] end
  end
  return base .. '~' .. string.format('%.0f', next_seq())
end

-- Message ids for these task ids that nothing living and no dead letter has, nor another one of this call.
local function unique_ids(task_ids)
  local ids, used = {}, {}
  for i = 1, #task_ids do ids[i] = plain_id(task_ids[i]) end
  local living = call('HMGET', P .. 'messages', unpack(ids))
  local dead = call('HMGET', P .. 'dead', unpack(ids))
  for i = 1, #ids do
    if living[i] or dead[i] or used[ids[i]] then ids[i] = second_id(ids[i], used) end
    used[ids[i]] = true
  end
  return ids
end
