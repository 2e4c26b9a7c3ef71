-- Settles in-flight messages.
--
-- DERIVES
--   messages HASH
--   held:<consumer> HASH
--@include tags
--@include held_flags
-- Settles the messages of the tags in ARGV at `position`: they are never delivered again, and their slots stay taken.
-- Returns the number of stale tags and the position behind them.
local function settle_tags(consumer, position, epoch)
  local ids, entries, stale, behind = held_under_tags(consumer, position, epoch)
  local held, marks = {}, {}
  for i = 1, #ids do
    local entry = entries[i]
    local flags, at = string.byte(entry, FLAGS_AT), #held
    if flags % 2 == 0 then
      held[at + 1], marks[at + 1] = ids[i], ids[i]
      held[at + 2] = string.sub(entry, 1, FLAGS_AT - 1) .. string.char(flags + SETTLED)
        .. string.sub(entry, FLAGS_AT + 1)
      marks[at + 2] = '\0' .. consumer
    end
  end
  write('HSET', P .. 'held:' .. consumer, held)
  write('HSET', P .. 'messages', marks)
  return stale, behind
end
