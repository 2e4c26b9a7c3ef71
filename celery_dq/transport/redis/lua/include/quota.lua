-- The quotas of tenants.
--
-- DERIVES
--   quotas HASH
--   pauses ZSET
--@include state
-- The quota of a tenant is its own, else the default that was set live, else the one of the settings, else no limit.
-- A tenant is paused by its entry in `pauses`, or by its quota.
local UNLIMITED = {interval = 0, burst = 1, weight = 1, concurrency = 0, paused = false, source = 'none'}

local function read_quota(packed, source)
  if not packed or #packed ~= 33 then return nil end
  local interval, burst, weight, concurrency, paused = struct.unpack('>ddddB', packed)
  if not (weight > 0) then return nil end
  return {interval = interval, burst = math.max(burst, 1), weight = weight, concurrency = concurrency,
    paused = paused == 1, source = source}
end

local function quotas_of(tenants)
  local found = {}
  if #tenants == 0 then return found end
  local known = call('HLEN', P .. 'quotas')
  local rows = known > 0 and call('HMGET', P .. 'quotas', 'default', 'config') or {}
  local shared = read_quota(rows[1], 'default') or read_quota(rows[2], 'config') or UNLIMITED
  if known > (rows[1] and 1 or 0) + (rows[2] and 1 or 0) then
    local fields = {}
    for i = 1, #tenants do fields[i] = 't:' .. tenants[i] end
    rows = call('HMGET', P .. 'quotas', unpack(fields))
    for i = 1, #tenants do found[i] = rows[i] and read_quota(rows[i], 'tenant') or shared end
  else
    for i = 1, #tenants do found[i] = shared end
  end
  if call('EXISTS', P .. 'pauses') == 1 then
    local since = call('ZMSCORE', P .. 'pauses', unpack(tenants))
    for i = 1, #tenants do
      if since[i] then
        local paused = {}
        for name, part in pairs(found[i]) do paused[name] = part end
        paused.paused = true
        found[i] = paused
      end
    end
  end
  return found
end

-- Returns when the tenant's next message is allowed (GCRA), in µs; a time that is not after `now` means at once.
local function permit_due(arrival, quota)
  return arrival - (quota.burst - 1) * quota.interval
end

-- Returns the theoretical arrival time after one more message.
local function take_permit(arrival, quota)
  return math.max(arrival, now) + quota.interval
end
