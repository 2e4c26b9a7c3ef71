-- Renews the term of the leader.
--
-- KEYS
--   leader HASH: the last term
-- DERIVES
--   none
-- ARGV
--   who: the leader
--   token: the token of its term
--   session_ms: length of the term from now on without another renewal
-- RETURNS
--   '1', or '0' if this candidate does not lead any more
-- COST
--   four commands
-- GUARANTEE
--   An expired term is never renewed, even if no other candidate was elected.
local call = redis.call
-- A server without free memory refuses growing writes unless the script has written before. Without a leader, the
-- queue would never shrink.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local seen = call('HMGET', KEYS[1], 'token', 'who', 'until')
if seen[2] ~= ARGV[1] or seen[1] ~= ARGV[2] or tonumber(seen[3] or 0) <= now then
  return '0'
end
call('HSET', KEYS[1], 'until', now + tonumber(ARGV[3]) * 1000)
return '1'
