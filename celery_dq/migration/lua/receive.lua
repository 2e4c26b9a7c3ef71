-- Puts messages from a tenant broker into the lists of kombu's Redis transport, once.
--
-- KEYS
--   arrived HASH: the consumer of the migrations to here, and the batches that have arrived
--   list* LIST: the messages of one queue and one priority; the oldest is at the right
-- DERIVES
--   none
-- ARGV
--   batch: name of the batch
--   ttl_ms: how long the names of batches are kept from now
--   (list, message)*: place of the list among the lists, from 1; the message as a list has it
-- RETURNS
--   1, or 0 if the batch has arrived before; nothing changed then
-- COST
--   a command per list and per message, and three more
-- GUARANTEE
--   All messages of a batch arrive, in their order, or none does. A batch arrives once.
for i = 2, #KEYS do
  local kind = redis.call('TYPE', KEYS[i])['ok']
  if kind ~= 'none' and kind ~= 'list' then
    return redis.error_reply('WRONGTYPE receive: ' .. KEYS[i] .. ' is a ' .. kind .. ', not the list of a queue')
  end
end
if redis.call('HSETNX', KEYS[1], ARGV[1], '1') == 0 then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for i = 3, #ARGV, 2 do redis.call('LPUSH', KEYS[1 + tonumber(ARGV[i])], ARGV[i + 1]) end
return 1
