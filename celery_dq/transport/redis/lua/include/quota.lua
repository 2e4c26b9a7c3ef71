-- The quotas of tenants.
--
-- DERIVES
--   quotas HASH
--   pauses ZSET
--   arriving ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--@include state
--@include packed_quota
-- The quota of a tenant is its own, else the default that was set live, else the one of the settings, else no limit.
-- A tenant is paused by its entry in `pauses` or, while it moves here, in `arriving`, or by its quota.
dq.UNLIMITED = {interval = 0, burst = 1, weight = 1, concurrency = 0, paused = false, max_waiting = 0, source = 'none'}

-- Whether a tenant may have a limit or a pause, or may have had one. When none has, tenants wait in `turn` only and have
-- no finish tags. The scripts that set the first quota or pause do so before they ask.
dq.has_limits = call('EXISTS', P .. 'quotas', P .. 'pauses', P .. 'throttled', P .. 'at_concurrency', P .. 'paused',
  P .. 'finish_tags', P .. 'limiter', P .. 'arriving') > 0

-- Whether a tenant may be paused by its entry in `pauses` or `arriving`. The scripts that write the first one do so before
-- they ask.
dq.has_pauses = call('EXISTS', P .. 'pauses', P .. 'arriving') > 0

function dq.quotas_of(tenants)
  local found = {}
  if #tenants == 0 then return found end
  if not dq.has_limits then
    for i = 1, #tenants do found[i] = dq.UNLIMITED end
    return found
  end
  local fields, is_short = {'default', 'config'}, #tenants <= 4
  if is_short then
    for i = 1, #tenants do fields[i + 2] = 't:' .. tenants[i] end
  end
  local rows = call('HMGET', P .. 'quotas', unpack(fields))
  local shared = read_quota(rows[1], 'default') or read_quota(rows[2], 'config') or dq.UNLIMITED
  local before = 2
  if not is_short and call('HLEN', P .. 'quotas') > (rows[1] and 1 or 0) + (rows[2] and 1 or 0) then
    for i = 1, #tenants do fields[i] = 't:' .. tenants[i] end
    rows, before = call('HMGET', P .. 'quotas', unpack(fields)), 0
  end
  for i = 1, #tenants do
    local own = rows[before + i]
    found[i] = own and read_quota(own, 'tenant') or shared
  end
  if dq.has_pauses then
    local since, arriving = call('ZMSCORE', P .. 'pauses', unpack(tenants)), call('ZMSCORE', P .. 'arriving', unpack(tenants))
    for i = 1, #tenants do
      if since[i] or arriving[i] then
        local paused = {}
        for name, part in pairs(found[i]) do paused[name] = part end
        paused.paused, paused.is_paused_by_quota = true, found[i].paused
        found[i] = paused
      end
    end
  end
  return found
end

-- Notes that a quota, packed, may have a bound for the backlog. The scripts that store a quota call it.
function dq.note_bound(packed)
  local quota = read_quota(packed)
  if quota and quota.max_waiting > 0 then state.bounds = 1 end
end

-- Returns whether a tenant of these messages may have a bound for its backlog.
function dq.may_have_bound(messages)
  local fields, seen = {'default', 'config'}, {}
  for i = 1, #messages do
    local tenant = messages[i].tenant
    if not seen[tenant] then
      seen[tenant], fields[#fields + 1] = true, 't:' .. tenant
    end
  end
  local rows = call('HMGET', P .. 'quotas', unpack(fields))
  for i = 1, #rows do
    if rows[i] and string.sub(rows[i], 34, 37) ~= '\0\0\0\0' then return true end
  end
  return false
end

-- Returns the theoretical arrival time after one more message.
function dq.take_permit(arrival, quota)
  return math.max(arrival, now) + quota.interval
end
