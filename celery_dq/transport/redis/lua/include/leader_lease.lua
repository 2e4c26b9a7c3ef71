-- The lease of a leader whose election is kept in the partition.
--
-- DERIVES
--   leader HASH
--@include state
--@include fencing
-- Whether a leader has a lease that has not expired. False where the election is kept elsewhere.
function dq.has_leader_lease()
  return (finite(call('HGET', P .. 'leader', 'until')) or 0) > now
end
-- Whether the leader's lease has expired. False where the election is kept elsewhere.
function dq.has_lost_leadership()
  if state.epoch == 0 then return false end
  local term = call('HMGET', P .. 'leader', 'token', 'until')
  return (finite(term[1]) or 0) == state.epoch and (finite(term[2]) or 0) <= now
end
