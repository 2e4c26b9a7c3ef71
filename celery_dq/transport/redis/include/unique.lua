--@include state
--@include ids
-- Message ids for these task ids that nothing living and no dead letter has, nor another one of this call.
local function unique_ids(task_ids)
  local bases = {}
  for i = 1, #task_ids do bases[i] = plain_id(task_ids[i]) end
  local living = call('HMGET', P .. 'messages', unpack(bases))
  local dead = call('HMGET', P .. 'dead', unpack(bases))
  local ids, used = {}, {}
  for i = 1, #bases do
    local id = bases[i]
    if living[i] or dead[i] or used[id] then
      local second = ids_of(task_ids[i])
      local lives, died = call('HMGET', P .. 'messages', unpack(second)), call('HMGET', P .. 'dead', unpack(second))
      id = nil
      for j = 2, #second do
        if not (lives[j] or died[j] or used[second[j]]) then id = second[j] break end
      end
      id = id or bases[i] .. '~' .. string.format('%.0f', next_seq())
    end
    ids[i] = id
    used[id] = true
  end
  return ids
end
