--@include state
--@include ids
--@include held
-- On a led queue, what the running task publishes under its own id (a retry, a replacement) takes its place: it
-- is not delayed, but the leader waits for it. Returns the scores of those tasks that run, by position.
local function places_of(task_ids)
  local places = {}
  if state.epoch == 0 or state.leader == '' then return places end
  for i = 1, #task_ids do
    local ids = ids_of(task_ids[i])
    local entries = call('HMGET', P .. 'held:' .. state.leader, unpack(ids))
    for j = 1, #ids do
      if entries[j] then places[i] = read_held(ids[j], entries[j]).score end
    end
  end
  return places
end
