--@include state
--@include epoch
-- Whether the leader's lease on its office has run out, where that is kept beside the queue.
local function is_out_of_office()
  if state.epoch == 0 then return false end
  local term = call('HMGET', P .. 'leader', 'token', 'until')
  return tonumber(term[1] or 0) == state.epoch and tonumber(term[2] or 0) <= now
end
