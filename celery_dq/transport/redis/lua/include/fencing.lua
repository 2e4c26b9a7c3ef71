-- The fencing token of a singleton queue.
-- A singleton queue is fenced: its epoch is the fencing token of the leader, which also stands behind the '@' in the
-- leader's consumer name. Returns whether this consumer may not act, because its name has no token or another one.
local function is_fenced_out(consumer, epoch)
  local has_token = string.find(consumer, '@', 1, true)
  return tonumber(has_token and string.match(consumer, '@(%d+)$') or 0) ~= epoch
end
