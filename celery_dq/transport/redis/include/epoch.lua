--@include state
-- A queue that one leader consumes is fenced: its epoch is the leader's token, and stands behind the '@' in the
-- name under which the leader consumes. Whether this consumer may not act: it names no token, or another one.
local function is_fenced_out(consumer)
  return tonumber(string.match(consumer, '@(%d+)$') or 0) ~= state.epoch
end
