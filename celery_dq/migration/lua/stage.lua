-- Takes messages out of a list of kombu's Redis transport.
--
-- KEYS
--   source LIST: messages of one queue and one priority; the oldest is at the right
--   staged LIST: messages that the migration has taken; the oldest is at the right
--   state HASH: state of the migration
-- DERIVES
--   none
-- ARGV
--   producer: the producer id of the migration
--   field: the field of the state that counts the messages of this queue that the target has
--   message*: the messages to take, the oldest first, as the list has them
-- RETURNS
--   the number of messages that were taken; one that is not in the list any more is left out;
--   -1 if this migration is complete, and nothing changed then
-- COST
--   two commands per message, O(its distance from the right end of the list)
-- GUARANTEE
--   A message is in the source, in the staged list or with a worker: in one place only.
if redis.call('HGET', KEYS[3], 'producer') ~= ARGV[1] then return -1 end
redis.call('HSETNX', KEYS[3], ARGV[2], '0')
local taken = 0
for i = 3, #ARGV do
  if redis.call('LREM', KEYS[1], -1, ARGV[i]) == 1 then
    redis.call('LPUSH', KEYS[2], ARGV[i])
    taken = taken + 1
  end
end
return taken
