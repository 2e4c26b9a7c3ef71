-- The fencing token of a singleton queue.
--@include state
-- A singleton queue is fenced: its epoch is the fencing token of the leader, which also stands behind the '@' in the
-- leader's consumer name. Returns whether this consumer may not act, because its name has no token or another one.
function dq.is_fenced_out(consumer)
  return tonumber(string.match(consumer, '@(%d+)$') or 0) ~= state.epoch
end
