-- The pauses of tenants that end by themselves. That of the whole queue is the field `paused_until` of the state.
--
-- DERIVES
--   pauses ZSET
--   pause_ends ZSET
--@include state
--@uses tenant_placement
-- Notes in the state when the first pause of a tenant ends; 0 when none ends by itself.
function dq.note_pause_ends()
  state.resume_at = tonumber(call('ZRANGE', P .. 'pause_ends', '0', '0', 'WITHSCORES')[2] or 0)
end

-- Resumes tenants whose pause is over, at most `limit` of them. Returns how many there were.
function dq.end_pauses(limit)
  local tenants = call('ZRANGEBYSCORE', P .. 'pause_ends', '-inf', now, 'LIMIT', 0, limit)
  if #tenants > 0 then
    call('ZREM', P .. 'pauses', unpack(tenants))
    call('ZREM', P .. 'pause_ends', unpack(tenants))
    dq.replace(tenants)
  end
  dq.note_pause_ends()
  return #tenants
end
