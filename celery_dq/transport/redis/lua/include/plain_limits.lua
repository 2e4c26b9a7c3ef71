-- The limits of tenants whose next message may run at once.
--
-- DERIVES
--   quotas HASH
--   running HASH
--   limiter ZSET
--@include clock
--@include packed_quota
--@include running
-- Returns per tenant its quota, the text of its slots, and when its next message was due by its rate; nil when one of these
-- tenants has reached a limit, is paused by its quota, or has counts of claimed messages (see `running`). No tenant may be
-- paused by other keys. An unlimited tenant has the interval and the concurrency 0.
local function limits_within(tenants)
  local fields = {'default', 'config'}
  for i = 1, #tenants do fields[i + 2] = 't:' .. tenants[i] end
  local rows = call('HMGET', P .. 'quotas', unpack(fields))
  local shared = read_quota(rows[1]) or read_quota(rows[2]) or {interval = 0, weight = 1, concurrency = 0}
  local slots, quotas, arrivals, is_rated = call('HMGET', P .. 'running', unpack(tenants)), {}, {}, false
  for i = 1, #tenants do
    local quota = read_quota(rows[i + 2]) or shared
    if quota.paused or (slots[i] and #slots[i] == COUNTED)
      or (quota.concurrency > 0 and (slots[i] or 0) + 0 >= quota.concurrency) then return nil end
    quotas[i], is_rated = quota, is_rated or quota.interval > 0
  end
  if is_rated then arrivals = call('ZMSCORE', P .. 'limiter', unpack(tenants)) end
  for i = 1, #tenants do
    local quota, arrival = quotas[i], (arrivals[i] or 0) + 0
    arrivals[i] = arrival
    if quota.interval > 0 and arrival - quota.tolerance > now then return nil end
  end
  return quotas, slots, arrivals
end
