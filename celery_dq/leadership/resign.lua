-- Ends the term of the leader, and wakes a waiting candidate.
--
-- KEYS
--   leader HASH: the last term
--   vacant LIST: wakes a waiting candidate
-- DERIVES
--   none
-- ARGV
--   who: the leader
--   token: the token of its term
--   clean: '1' if no work of the term runs any more, else '0'
-- RETURNS
--   '1', or '0' if this candidate did not lead any more; then nothing was changed
-- COST
--   six commands
-- GUARANTEE
--   The token is kept, so that the next one is above it.
local call = redis.call
-- A server without free memory refuses growing writes unless the script has written before. Without a leader, the
-- queue would never shrink.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local seen = call('HMGET', KEYS[1], 'token', 'who')
if seen[2] ~= ARGV[1] or seen[1] ~= ARGV[2] then
  return '0'
end
call('HSET', KEYS[1], 'until', clock[1] * 1000000 + clock[2], 'clean', ARGV[3])
call('DEL', KEYS[2])
call('RPUSH', KEYS[2], '1')
return '1'
