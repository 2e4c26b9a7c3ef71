-- A packed quota.
-- The quota of a spread tenant is this partition's share of it. Behind a share stands the whole quota, for readers.
-- Returns nil when it is absent or cannot be read. GCRA allows a message `tolerance` µs before its arrival time. With a
-- `max_waiting` above 0, at most that many messages wait for their turn; `when_full` is a number of `backlog_bound`.
local function read_quota(packed, source)
  if not packed or #packed < 38 then return nil end
  local interval, burst, weight, concurrency, paused, max_waiting, when_full = struct.unpack('>ddddBIB', packed)
  if not (weight > 0) then return nil end
  return {interval = interval, burst = burst, tolerance = (burst - 1) * interval, weight = weight,
    concurrency = concurrency, paused = paused == 1, max_waiting = max_waiting, when_full = when_full, source = source}
end
