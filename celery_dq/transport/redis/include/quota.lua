--@include state
-- Quotas: a tenant's own, else the default one set live, else the one from the settings, else no limit.
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
  return found
end

-- When the next token of a tenant is due (GCRA); not after now means at once.
local function token_due(arrival, quota)
  return arrival - (quota.burst - 1) * quota.interval
end

-- The theoretical arrival time after one more message.
local function take_token(arrival, quota)
  return math.max(arrival, now) + quota.interval
end
