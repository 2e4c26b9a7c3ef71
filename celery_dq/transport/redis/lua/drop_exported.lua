-- Deletes the messages of the outbox, which another partition already has.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   deliveries HASH
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   outbox LIST
-- ARGV
--   number: the number of the outbox
-- RETURNS
--   the number of deleted messages; 0 when the outbox is another one
-- COST
--   two commands, and at most three per message
-- GUARANTEE
--   An outbox with another number stays.
--@include partition
local stored = call('LRANGE', P .. 'outbox', 0, -1)
if stored[1] ~= ARGV[1] then return 0 end
for i = 4, #stored do
  local entry = cmsgpack.unpack(stored[i])
  if entry[2] == 'dead' then
    call('HDEL', P .. 'dead', entry[1])
    call('HDEL', P .. 'dead_info', entry[1])
    call('ZREM', P .. 'dead_index', entry[1])
  else
    call('HDEL', P .. 'messages', entry[1])
    call('HDEL', P .. 'deliveries', entry[1])
  end
end
call('DEL', P .. 'outbox')
return #stored - 3
