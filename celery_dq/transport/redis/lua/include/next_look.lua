-- The end of a claim, which looks for work itself, and so deletes the wake-up. It adds the wake-up again for what it
-- leaves, unless the consumer plans the next look.
--
-- DERIVES
--   discards ZSET
--   wake LIST
--@include state
--@uses wake
-- Returns whether a message may be served now, and the µs until the look that this consumer has planned, or nil. Args:
-- whether the consumer may plan the look, whether a message in turn may be served, whether there may be discards or
-- delayed messages, and the µs after which a claim removes more messages that cannot run, or nil.
function dq.plan_next_look(consumer, may_keep, is_busy, has_rare, pause)
  local rest = not is_busy and has_rare and call('EXISTS', P .. 'discards') == 1 and dq.discards_rest() or nil
  if pause then rest = math.min(rest or pause, pause) end
  local eligible = is_busy or rest == 0
  local may_be_due = rest or has_rare or state.evict > 0 or state.paused_until > 0 or dq.has_limits
  local due = not eligible and may_be_due and dq.next_due(rest, has_rare) or nil
  if due and due <= now then eligible = true end
  if state.next_look_owner == consumer and (eligible or not due or not may_keep) then state.next_look_owner = '' end
  call('DEL', P .. 'wake')
  local others_look, look_in = eligible, nil
  if not eligible and not due then
    state.next_look_owner = ''
  elseif not eligible and (state.next_look_owner == consumer or not dq.is_kept(due)) then
    if may_keep then
      state.next_look_owner, state.next_look, look_in = consumer, due, due - now
    else
      state.next_look_owner, others_look = '', true
    end
  end
  if others_look then
    call('RPUSH', P .. 'wake', '1')
    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
  end
  return eligible, look_in
end
