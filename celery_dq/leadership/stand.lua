-- Records a candidate, and returns whether the leadership is vacant.
--
-- KEYS
--   leader HASH: the last term
--   candidates ZSET: candidate -> time of its last call, in seconds
-- DERIVES
--   none
-- ARGV
--   who: the candidate
--   session_s: a candidate without a call for so long is removed
-- RETURNS
--   an array: '1' if this candidate may be elected, else '0'; the µs until that may change without a wake-up
-- COST
--   six commands
-- GUARANTEE
--   Never changes the leader. For a sixth of a session after its term, the last leader comes behind all other
--   candidates: each of them looks twice in that time.
local call = redis.call
-- A server without free memory refuses growing writes unless the script has written before. Without a leader, the
-- queue would never shrink.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local seen = call('HMGET', KEYS[1], 'who', 'until')
call('ZADD', KEYS[2], clock[1], ARGV[1])
call('ZREMRANGEBYSCORE', KEYS[2], '-inf', clock[1] - tonumber(ARGV[2]))
local left = tonumber(seen[2] or 0) - clock[1] * 1000000 - clock[2]
local owned = seen[1] == ARGV[1]
if owned and left <= 0 and call('ZCARD', KEYS[2]) > 1 then
  left = left + ARGV[2] * 1000000 / 6
  owned = false
end
return {(left <= 0 or owned) and '1' or '0', string.format('%.0f', math.max(left, 0))}
