-- The outbox of a move to another partition.
--
-- DERIVES
--   outbox LIST
--@include partition
-- Returns a set of the ids of its messages and dead letters. Another partition may already have these.
function dq.in_outbox()
  local stored, found = call('LRANGE', P .. 'outbox', 3, -1), {}
  for i = 1, #stored do found[cmsgpack.unpack(stored[i])[1]] = true end
  return found
end
