-- The pauses of tenants that end by themselves. That of the whole queue is the field `paused_until` of the state.
--
-- DERIVES
--   pauses ZSET
--   pause_ends ZSET
--   pause_causes HASH
--@include state
--@uses tenant_placement
-- Notes in the state when the first pause of a tenant ends; 0 when none ends by itself.
function dq.note_pause_ends()
  state.resume_at = tonumber(call('ZRANGE', P .. 'pause_ends', '0', '0', 'WITHSCORES')[2] or 0)
end

-- Pauses a tenant until `ends`, in µs; 0 is never. `cause` is kept with the pause; '' is none. With `extends`, a pause that ends
-- later, or never, stays as it is. Returns whether something was changed, since when the tenant is paused, and until when.
function dq.pause_tenant(tenant, ends, cause, extends)
  local before = tonumber(call('ZSCORE', P .. 'pause_ends', tenant) or 0)
  -- A pause that is over lies here until a claim removes it. A new pause does not prolong it.
  if before > 0 and before <= now then call('ZREM', P .. 'pauses', tenant) end
  local is_new = call('ZADD', P .. 'pauses', 'NX', now, tenant) == 1
  local since = is_new and now or tonumber(call('ZSCORE', P .. 'pauses', tenant))
  if extends and not is_new and (before == 0 or before >= ends) then return false, since, before end
  if ends > 0 then
    call('ZADD', P .. 'pause_ends', ends, tenant)
  else
    call('ZREM', P .. 'pause_ends', tenant)
  end
  if cause ~= '' then
    call('HSET', P .. 'pause_causes', tenant, cause)
  else
    call('HDEL', P .. 'pause_causes', tenant)
  end
  return is_new or before ~= ends, since, ends
end

-- Resumes tenants whose pause is over, at most `limit` of them. Returns how many there were.
function dq.end_pauses(limit)
  local tenants = call('ZRANGEBYSCORE', P .. 'pause_ends', '-inf', now, 'LIMIT', 0, limit)
  if #tenants > 0 then
    call('ZREM', P .. 'pauses', unpack(tenants))
    call('ZREM', P .. 'pause_ends', unpack(tenants))
    call('HDEL', P .. 'pause_causes', unpack(tenants))
    dq.replace(tenants)
  end
  dq.note_pause_ends()
  return #tenants
end
