-- Ends a migration of which nothing is staged.
--
-- KEYS
--   state HASH: state of the migration
--   staged* LIST: the staged messages of each queue that the state has a field of
-- DERIVES
--   none
-- ARGV
--   producer: the producer id of the migration
-- RETURNS
--   1, or 0 if messages are staged, or another migration is under way; nothing changed then
-- COST
--   O(fields of the state), and a command per queue
-- GUARANTEE
--   Numbers of this producer are not given again: later steps of this migration are refused.
if redis.call('HGET', KEYS[1], 'producer') ~= ARGV[1] then return 0 end
-- The fields are "target", "producer", and one per queue. One more queue has staged messages meanwhile.
if redis.call('HLEN', KEYS[1]) ~= #KEYS + 1 then return 0 end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then return 0 end
end
redis.call('DEL', KEYS[1])
return 1
