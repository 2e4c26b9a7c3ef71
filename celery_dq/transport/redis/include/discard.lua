--@include state
--@include dedup
-- Turns messages into discards, in this order; they must have been found in `messages`.
local function discard(ids, reason)
  local discards, reasons = {}, {}
  for i = 1, #ids do
    discards[2 * i - 1] = next_seq()
    discards[2 * i] = ids[i]
    reasons[2 * i - 1] = ids[i]
    reasons[2 * i] = reason
  end
  write('HSET', P .. 'reasons', reasons)
  write('ZADD', P .. 'discards', discards)
  if call('EXISTS', P .. 'claimants') == 1 then
    for i = 1, #ids do dedup().leave(ids[i], false) end
  end
end
