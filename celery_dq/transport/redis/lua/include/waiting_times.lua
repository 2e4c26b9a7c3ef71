-- The waiting times of claimed messages.
--@include clock
-- A field of the state packs the sum of the times in µs, and how many messages are in each of 11 buckets. The field
-- `waits_alone` is of messages that were alone in the backlog: their tenants had no other message while they waited. The field
-- `waits_in_line` is of all others. Redis keeps a small hash compact as long as no value is longer than 64 bytes.
local WAITS = '>dI5I5I5I5I5I5I5I5I5I5I5'

local function unpack_waits(field)
  if not field or #field ~= 63 then return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
  return {struct.unpack(WAITS, field)}
end

-- By how much each step of priority went before its time, when a message was pushed last.
local head_start

-- Adds the wait of a message to unpacked times: since it was stored or due. With strict priority a step of priority is
-- STRICT, which is longer than any wait, so that the remainder is the wait. The buckets end at 1, 5, 25, 100 and 500 ms,
-- 2, 10, 60, 600 and 3600 s; the inspector has the same bounds (`WAIT_BOUNDS_S`).
local function add_wait(waits, score, priority)
  local STRICT, wait = 1e15, now - score
  if wait >= STRICT / 2 then
    wait = wait % STRICT
    -- The message has a sequence time that is some µs ahead of the clock.
    if wait >= STRICT / 2 then wait = 0 end
  elseif priority > 0 then
    head_start = head_start or finite(call('HGET', KEYS[1], 'head')) or 0
    wait = wait - priority * head_start
  end
  if wait < 0 then wait = 0 end
  local bucket
  if wait < 500000 then
    if wait < 25000 then
      bucket = wait < 1000 and 2 or wait < 5000 and 3 or 4
    else
      bucket = wait < 100000 and 5 or 6
    end
  elseif wait < 60000000 then
    bucket = wait < 2000000 and 7 or wait < 10000000 and 8 or 9
  else
    bucket = wait < 600000000 and 10 or wait < 3600000000 and 11 or 12
  end
  waits[1] = waits[1] + wait
  waits[bucket] = waits[bucket] + 1
end
