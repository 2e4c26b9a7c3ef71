-- The end of a claim. The consumer may plan the next look itself, so that it needs no wake-up.
--
-- DERIVES
--   turn ZSET
--   discards ZSET
--   wake LIST
--@include state
--@include wake
-- Returns whether a message may be served now, and the µs until the look that this consumer has planned, or nil.
local function plan_next_look(consumer, may_keep)
  local eligible = call('EXISTS', P .. 'turn', P .. 'discards') > 0
  local due = not eligible and next_due()
  if due and due <= now then eligible = true end
  if state.next_look_owner == consumer and (eligible or not due or not may_keep) then state.next_look_owner = '' end
  local others_look, look_in = eligible, nil
  if not eligible and not due then
    state.next_look_owner = ''
    call('DEL', P .. 'wake')
  elseif not eligible and (state.next_look_owner == consumer or not is_kept(due)) then
    if may_keep then
      state.next_look_owner, state.next_look, look_in = consumer, due, due - now
      call('DEL', P .. 'wake')
    else
      state.next_look_owner, others_look = '', true
    end
  end
  if others_look and call('EXISTS', P .. 'wake') == 0 then call('RPUSH', P .. 'wake', '1') end
  return eligible, look_in
end
