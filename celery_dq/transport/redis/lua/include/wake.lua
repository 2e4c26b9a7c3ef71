-- Wakes a consumer.
--
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   delayed ZSET
--   discards ZSET
--   leases ZSET
--   wake LIST
--@include state
--@uses quota
-- A rest of discards is never longer.
dq.MAX_REST_US = 1000000
-- The end of a pause that does not end by itself, in µs.
dq.WITHOUT_END = 9e15

-- There is at most one wake-up, an element of `wake`. It is there when a message may be served, or when a message is
-- due later and no living consumer is going to look then. Each script that may have made a message eligible ends with
-- `wake`. On a Redis Cluster, where no consumer can wait for lists of several slots, a message on the channel `woken` goes
-- with it. The message is the number of consumers, over which they spread their attempts to take the wake-up.

-- Returns the µs until a claim may take discards. A clock that went back shortens a rest.
function dq.discards_rest()
  local rest = state.discards_at - now
  return rest > 0 and rest <= dq.MAX_REST_US and rest or 0
end

-- Returns when the next delayed message, throttled tenant, end of a pause or dedup lock is due, in µs, or nil. `rest`
-- is the µs until discards may be taken, nil without discards; `has_delayed` is false when no message is delayed. In a pause
-- of the queue, messages and tenants wait for its end.
function dq.next_due(rest, has_delayed)
  if state.paused_until > now then
    local due = state.paused_until < dq.WITHOUT_END and state.paused_until or nil
    if rest then due = math.min(due or now + rest, now + rest) end
    if state.evict > 0 then due = math.min(due or state.evict, state.evict) end
    return due
  end
  local message = has_delayed and call('ZRANGE', P .. 'delayed', '0', '0', 'WITHSCORES')[2]
  local tenant = dq.has_limits and call('ZRANGE', P .. 'throttled', '0', '0', 'WITHSCORES')[2]
  local due = tonumber(message or tenant or nil)
  if message and tenant then due = math.min(tonumber(message), tonumber(tenant)) end
  if rest then due = math.min(due or now + rest, now + rest) end
  if state.resume_at > 0 then due = math.min(due or state.resume_at, state.resume_at) end
  if state.evict > 0 then return math.min(due or state.evict, state.evict) end
  return due
end

-- Returns whether a living consumer is going to look by `due`. A consumer that has not looked at its planned time
-- does not count: it has no free slot, or has given the look up.
function dq.is_kept(due)
  if state.next_look_owner == '' or state.next_look > due or state.next_look <= now then return false end
  local deadline = call('ZSCORE', P .. 'leases', state.next_look_owner)
  return deadline and tonumber(deadline) > now
end

-- `is_ready`: the script knows that a message may be served.
function dq.wake(is_ready)
  if call('EXISTS', P .. 'wake') == 1 then return end
  local is_paused, waiting = state.paused_until > now, nil
  if is_paused then
    waiting = call('EXISTS', P .. 'discards')
  else
    waiting = is_ready and 2 or call('EXISTS', P .. 'turn', P .. 'discards')
  end
  local rest = waiting == 1 and dq.discards_rest() or nil
  if waiting == 0 or (rest and rest > 0 and (is_paused or call('EXISTS', P .. 'turn') == 0)) then
    local due = dq.next_due(rest, true)
    if not due then
      state.next_look_owner = ''
      return
    end
    if due > now then
      if dq.is_kept(due) then return end
      state.next_look_owner = ''
    end
  end
  call('RPUSH', P .. 'wake', '1')
  --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
end
