-- The tags of in-flight messages.
--
-- DERIVES
--   held:<consumer> HASH
--@include partition
--@include fencing
-- Counts stale tags. A full server refuses the count, which must not refuse the ack.
local function count_stale(count)
  if count > 0 then redis.pcall('HINCRBY', KEYS[1], 'stale_acks', count) end
  return count
end

-- Reads `n, (claim number, id)*` from ARGV at `position`. Returns the ids and the packed entries of the messages that
-- the consumer holds under these tags, each once; the number of stale tags; and the position behind the tags. All tags
-- of a consumer that is fenced out are stale.
local function held_under_tags(consumer, position, epoch)
  local n, held, entries = tonumber(ARGV[position]), {}, {}
  local behind = position + 1 + 2 * n
  if n == 0 or is_fenced_out(consumer, epoch) then return held, entries, count_stale(n), behind end
  local ids, seen = {}, {}
  for i = 1, n do ids[i] = ARGV[position + 2 * i] end
  local found = call('HMGET', P .. 'held:' .. consumer, unpack(ids))
  for i = 1, n do
    local id, entry = ids[i], found[i]
    if entry and not seen[id] and struct.unpack('>d', entry) == tonumber(ARGV[position + 2 * i - 1]) then
      seen[id], held[#held + 1], entries[#entries + 1] = true, id, entry
    end
  end
  return held, entries, count_stale(n - #held), behind
end

-- Returns whether the tags in ARGV at `position`, which are to be settled, are the same as those behind them, which are to be
-- finished.
local function are_finished_too(position)
  local size = 1 + 2 * ARGV[position]
  for i = position, position + size - 1 do
    if ARGV[i] ~= ARGV[i + size] then return false end
  end
  return size > 1
end
