-- Takes messages that workers of kombu's Redis transport have received, and have not acknowledged.
--
-- KEYS
--   unacked HASH: delivery tag -> message, exchange and routing key
--   unacked_index ZSET: delivery tag -> time of the delivery, in seconds
--   staged LIST: messages that the migration has taken; the oldest is at the right
--   state HASH: state of the migration
-- DERIVES
--   none
-- ARGV
--   producer: the producer id of the migration
--   field: the field of the state that counts the messages of this queue that the target has
--   (tag, message)*: the delivery tag; the message as a list has it
-- RETURNS
--   the number of messages that were taken; one that was acknowledged or restored before is left out;
--   -1 if this migration is complete, and nothing changed then
-- COST
--   three commands per message
-- GUARANTEE
--   A message is with its worker or in the staged list: in one place only.
if redis.call('HGET', KEYS[4], 'producer') ~= ARGV[1] then return -1 end
redis.call('HSETNX', KEYS[4], ARGV[2], '0')
local taken = 0
for i = 3, #ARGV, 2 do
  if redis.call('HDEL', KEYS[1], ARGV[i]) == 1 then
    redis.call('ZREM', KEYS[2], ARGV[i])
    redis.call('LPUSH', KEYS[3], ARGV[i + 1])
    taken = taken + 1
  end
end
return taken
