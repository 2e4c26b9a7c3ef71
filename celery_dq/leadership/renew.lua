-- Stays the leader.
--
-- KEYS
--   leader HASH: the last term
-- DERIVES
--   none
-- ARGV
--   who: the leader
--   token: of its term
--   session_ms: how long the lead is kept without another renewal
-- RETURNS
--   '1', or '0' when this one does not lead any more
-- COST
--   four commands
-- GUARANTEE
--   A term that has run out is never renewed, not even when nobody else was elected.
local call = redis.call
-- A full server refuses what may need memory until a script has written something, and stays full without a leader.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local seen = call('HMGET', KEYS[1], 'token', 'who', 'until')
if seen[2] ~= ARGV[1] or seen[1] ~= ARGV[2] or tonumber(seen[3] or 0) <= now then
  return '0'
end
call('HSET', KEYS[1], 'until', now + tonumber(ARGV[3]) * 1000)
return '1'
