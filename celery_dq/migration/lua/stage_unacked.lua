-- Takes messages that workers of kombu's Redis transport have received, and have not acknowledged.
--
-- KEYS
--   unacked HASH: delivery tag -> message, exchange and routing key
--   unacked_index ZSET: delivery tag -> time of the delivery, in seconds
--   staged LIST: messages that the migration has taken; the oldest is at the right
-- DERIVES
--   none
-- ARGV
--   (tag, message)*: the delivery tag; the message as a list has it
-- RETURNS
--   the number of messages that were taken; one that was acknowledged or restored before is left out
-- COST
--   three commands per message
-- GUARANTEE
--   A message is with its worker or in the staged list: in one place only.
local taken = 0
for i = 1, #ARGV, 2 do
  if redis.call('HDEL', KEYS[1], ARGV[i]) == 1 then
    redis.call('ZREM', KEYS[2], ARGV[i])
    redis.call('LPUSH', KEYS[3], ARGV[i + 1])
    taken = taken + 1
  end
end
return taken
