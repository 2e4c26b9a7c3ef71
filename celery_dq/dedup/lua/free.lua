-- Takes a key from all who claim it, and tells them.
--
-- KEYS
--   claim HASH: head, heir and tail of the key, and who follows them
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are told
-- RETURNS
--   four strings: head, heir and tail as they were stored, and who followed them; '' for none
-- COST
--   some six commands
-- GUARANTEE
--   The tokens that were given are void.
--@include claim
local reply = call('HMGET', KEYS[1], 'head', 'heir', 'tail', 'followed')
call('DEL', KEYS[1])
claim = {}
tell_followers(ARGV[1])
for i = 1, 3 do
  local each = read_call(reply[i])
  if each then call('PUBLISH', ARGV[1] .. each.owner, KEYS[1]) end
  reply[i] = reply[i] or ''
end
reply[4] = reply[4] or ''
return reply
