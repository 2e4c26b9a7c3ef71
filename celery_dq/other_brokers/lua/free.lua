-- Removes all calls of a key, and wakes their owners.
--
-- KEYS
--   dedup_lock HASH: head, heir and tail of the key, and their followers
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are woken
-- RETURNS
--   four strings: head, heir and tail as they were stored, and their followers; '' for none
-- COST
--   some six commands
-- GUARANTEE
--   The tokens of the removed calls are void.
--@include dedup_lock
local reply = call('HMGET', KEYS[1], 'head', 'heir', 'tail', 'followed')
call('DEL', KEYS[1])
claim = {}
notify_followers(ARGV[1])
for i = 1, 3 do
  local each = read_call(reply[i])
  if each then call('PUBLISH', ARGV[1] .. each.owner, KEYS[1]) end
  reply[i] = reply[i] or ''
end
reply[4] = reply[4] or ''
return reply
