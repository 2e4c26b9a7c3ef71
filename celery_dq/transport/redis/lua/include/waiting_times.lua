-- The waiting times of claimed messages: a sum and a histogram in one field of the state.
--
-- The field `waits_alone` is of messages that were alone in line: their tenants had no other message while they waited.
-- The field `waits_in_line` is of all others. A field holds the sum in µs (a double), and the number of messages in each
-- of 11 buckets (five bytes each). Redis stores a hash compactly as long as no value is longer than 64 bytes.
--@include clock
local WAITS_BYTES = 63

-- Returns the place of the bucket of a wait of so many µs: below 1, 5, 25, 100 and 500 ms, 2, 10, 60, 600 and 3600 s, and
-- above. The inspector has the same bounds (`WAIT_BOUNDS_S` in `queue_counters.py`).
local function bucket_of(wait)
  if wait < 500000 then
    if wait < 25000 then return wait < 1000 and 9 or wait < 5000 and 14 or 19 end
    return wait < 100000 and 24 or 29
  end
  if wait < 60000000 then return wait < 2000000 and 34 or wait < 10000000 and 39 or 44 end
  return wait < 600000000 and 49 or wait < 3600000000 and 54 or 59
end

-- Counts a message {record, score} in `counts`: place of the bucket -> messages. The wait begins when the message was
-- stored or due. Returns it, 0 where `head` has changed since and tells no time.
local function count_wait(counts, record, score, head)
  local wait = now - score - string.byte(record, 2) * head
  if wait < 0 or wait > 1e14 then wait = 0 end
  local bucket = bucket_of(wait)
  counts[bucket] = (counts[bucket] or 0) + 1
  return wait
end

-- Returns the field with these counts and this sum of waits added.
local function add_waits(field, counts, sum)
  if not field or #field ~= WAITS_BYTES then field = string.rep('\0', WAITS_BYTES) end
  field = struct.pack('>d', struct.unpack('>d', field) + sum) .. string.sub(field, 9)
  for bucket, count in pairs(counts) do
    field = string.sub(field, 1, bucket - 1) .. struct.pack('>I5', struct.unpack('>I5', field, bucket) + count)
      .. string.sub(field, bucket + 5)
  end
  return field
end
