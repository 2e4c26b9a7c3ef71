-- The places that new messages of running tasks take on a singleton queue.
--
-- DERIVES
--   held:<consumer> HASH
--@include state
--@uses message_ids
--@uses in_flight
-- On a singleton queue, a message that a running task publishes under its own id (a retry, a replacement) takes the
-- place of the running message. It is not delayed; the leader waits until it is due. Returns the scores of the
-- messages that the leader holds, by position of their task ids.
function dq.places_of_retried(task_ids)
  local places = {}
  if state.epoch == 0 or state.leader == '' then return places end
  for i = 1, #task_ids do
    local ids = dq.ids_of(task_ids[i])
    local entries = call('HMGET', P .. 'held:' .. state.leader, unpack(ids))
    for j = 1, #ids do
      if entries[j] then places[i] = dq.read_held(ids[j], entries[j]).score end
    end
  end
  return places
end
