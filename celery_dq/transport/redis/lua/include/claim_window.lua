-- How fast the claims of a partition go on.
--@include state
--@include waiting_times
-- Ends the partition's window of claims: the field `claim_window` of the state packs a time, the number of claimed
-- messages and virtual time at its start, and the same of the window before. No claim left a backlog for long when the
-- window is twice as old as it should be, so both begin again.
function dq.end_claim_window(age)
  local total = 0
  for _, field in ipairs({'waits_alone', 'waits_in_line'}) do
    local waits = unpack_waits(state[field])
    for i = 2, 12 do total = total + waits[i] end
  end
  local start = struct.pack('>ddd', now, total, state.v)
  state.claim_window = start .. (age < 2 * CLAIM_WINDOW and string.sub(state.claim_window, 1, 24) or start)
end
