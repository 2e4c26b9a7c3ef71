-- Writes down that a candidate stands, and looks whether somebody leads.
--
-- KEYS
--   leader HASH: the last term
--   candidates ZSET: who stands -> when it looked last, in seconds
-- DERIVES
--   none
-- ARGV
--   who: the candidate
--   session_s: whoever has not looked for so long does not stand any more
-- RETURNS
--   an array: '1' when nobody leads but this one, else '0'; the µs until the present term ends, or '0'
-- COST
--   five commands
-- GUARANTEE
--   Changes nothing about who leads.
local call = redis.call
-- A full server refuses what may need memory until a script has written something, and stays full without a leader.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local seen = call('HMGET', KEYS[1], 'who', 'until')
call('ZADD', KEYS[2], clock[1], ARGV[1])
call('ZREMRANGEBYSCORE', KEYS[2], '-inf', clock[1] - tonumber(ARGV[2]))
local left = math.max(tonumber(seen[2] or 0) - clock[1] * 1000000 - clock[2], 0)
return {(left == 0 or seen[1] == ARGV[1]) and '1' or '0', string.format('%.0f', left)}
