-- Takes messages out of a list of kombu's Redis transport.
--
-- KEYS
--   source LIST: messages of one queue and one priority; the oldest is at the right
--   staged LIST: messages that the migration has taken; the oldest is at the right
-- DERIVES
--   none
-- ARGV
--   message*: the messages to take, the oldest first, as the list has them
-- RETURNS
--   the number of messages that were taken; one that is not in the list any more is left out
-- COST
--   two commands per message, O(its distance from the right end of the list)
-- GUARANTEE
--   A message is in the source, in the staged list or with a worker: in one place only.
local taken = 0
for i = 1, #ARGV do
  if redis.call('LREM', KEYS[1], -1, ARGV[i]) == 1 then
    redis.call('LPUSH', KEYS[2], ARGV[i])
    taken = taken + 1
  end
end
return taken
