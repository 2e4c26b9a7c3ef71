--@include state
-- The end of every script that may have made something eligible. There is at most one token. It is there when
-- something may be served, or when something is due later and no living consumer keeps the appointment.
local function next_due()
  local message = call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')[2]
  local tenant = call('ZRANGE', P .. 'throttled', 0, 0, 'WITHSCORES')[2]
  local due = tonumber(message or tenant or nil)
  if message and tenant then due = math.min(tonumber(message), tonumber(tenant)) end
  if state.evict > 0 then return math.min(due or state.evict, state.evict) end
  return due
end

-- Whether a living consumer is going to look by `due`. Whoever has let the time of his appointment pass does not
-- count: he has no room, or keeps it no longer. If he comes after all, he finds that somebody else has it.
local function is_kept(due)
  if state.owner == '' or state.appt > due or state.appt <= now then return false end
  local deadline = call('ZSCORE', P .. 'leases', state.owner)
  return deadline and tonumber(deadline) > now
end

local function wake()
  if call('EXISTS', P .. 'wake') == 1 then return end
  if call('EXISTS', P .. 'turn', P .. 'discards') == 0 then
    local due = next_due()
    if not due then
      state.owner = ''
      return
    end
    if due > now then
      if is_kept(due) then return end
      state.owner = ''
    end
  end
  call('RPUSH', P .. 'wake', '1')
end
