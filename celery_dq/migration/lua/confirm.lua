-- Removes staged messages that the target has.
--
-- KEYS
--   staged LIST: messages that the migration has taken; the oldest is at the right
--   state HASH: state of the migration
-- DERIVES
--   none
-- ARGV
--   producer: the producer id of the migration
--   field: the field of the state that counts the messages of this queue that the target has
--   before: its value when the messages were read
--   count: number of messages that the target has got, the oldest ones
-- RETURNS
--   1, or 0 if another process has removed them before, or this migration is complete; nothing changed then
-- COST
--   three commands, O(count)
-- GUARANTEE
--   A message keeps its number, which is its place in the list and the value of the field together.
local known = redis.call('HMGET', KEYS[2], 'producer', ARGV[2])
if known[1] ~= ARGV[1] or (known[2] or '0') ~= ARGV[3] then return 0 end
redis.call('LTRIM', KEYS[1], 0, -1 - tonumber(ARGV[4]))
redis.call('HINCRBY', KEYS[2], ARGV[2], ARGV[4])
return 1
