-- Settles in-flight messages.
--
-- DERIVES
--   messages HASH
--   held:<consumer> HASH
--@include partition
--@include held_flags
--@include fencing
-- Reads `n, (claim number, id)*` from ARGV at `position`, and settles these messages: they are never delivered again,
-- and their slots stay taken. Returns the number of stale tags and the position behind them. All tags of a consumer
-- that is fenced out are stale.
local function settle_tags(consumer, position, epoch)
  local n = tonumber(ARGV[position])
  local behind = position + 1 + 2 * n
  if n == 0 then return 0, behind end
  if is_fenced_out(consumer, epoch) then return n, behind end
  local key, mark, ids = P .. 'held:' .. consumer, '\0' .. consumer, {}
  for i = 1, n do ids[i] = ARGV[position + 2 * i] end
  local entries = call('HMGET', key, unpack(ids))
  local held, marks, seen, stale = {}, {}, {}, 0
  for i = 1, n do
    local id, entry = ids[i], entries[i]
    if entry and not seen[id] and struct.unpack('>d', entry) == tonumber(ARGV[position + 2 * i - 1]) then
      local flags, at = string.byte(entry, FLAGS_AT), #held
      seen[id] = true
      if flags % 2 == 0 then
        held[at + 1], marks[at + 1] = id, id
        held[at + 2] = string.sub(entry, 1, FLAGS_AT - 1) .. string.char(flags + SETTLED)
          .. string.sub(entry, FLAGS_AT + 1)
        marks[at + 2] = mark
      end
    else
      stale = stale + 1
    end
  end
  write('HSET', key, held)
  write('HSET', P .. 'messages', marks)
  return stale, behind
end
