-- Takes a key from all who claim it, and tells them.
--
-- KEYS
--   claim HASH: head, heir and tail of the key
-- DERIVES
--   none
-- ARGV
--   channel: prefix of the channels on which owners are told
-- RETURNS
--   three strings: head, heir and tail as they were stored; '' for none
-- COST
--   some six commands
-- GUARANTEE
--   The tokens that were given are void.
--@include claim
local reply = call('HMGET', KEYS[1], 'head', 'heir', 'tail')
call('DEL', KEYS[1])
for i = 1, 3 do
  local each = read_call(reply[i])
  if each then call('PUBLISH', ARGV[1] .. each.owner, KEYS[1]) end
  reply[i] = reply[i] or ''
end
return reply
