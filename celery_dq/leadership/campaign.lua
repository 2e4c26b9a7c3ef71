-- Makes a candidate the leader, if no other candidate leads.
--
-- KEYS
--   leader HASH: the last term
--   vacant LIST: wakes a waiting candidate
-- DERIVES
--   none
-- ARGV
--   who: the candidate
--   session_ms: length of a term without a renewal
--   floor: the new token is above this number, too
--   since: wall time of the election, for display
-- RETURNS
--   an array: the token, '1' if the predecessor handed over cleanly or there was none, else '0', and the token of the
--   predecessor if it was this candidate, else '0'; or '0' and the µs until the current term ends if another candidate
--   leads
-- COST
--   five commands
-- GUARANTEE
--   Tokens only grow: the hash has no time to live. Two candidates are never elected within one term.
local call = redis.call
-- A server without free memory refuses growing writes unless the script has written before. Without a leader, the
-- queue would never shrink.
call('HDEL', KEYS[1], '')
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
local seen = call('HMGET', KEYS[1], 'token', 'who', 'until', 'clean')
local owned = seen[2] == ARGV[1]
local ends = tonumber(seen[3] or 0)
if ends > now and not owned then
  return {'0', string.format('%.0f', ends - now)}
end
local token = math.max(tonumber(seen[1] or 0), tonumber(ARGV[3])) + 1
call('HSET', KEYS[1], 'token', token, 'who', ARGV[1], 'since', ARGV[4], 'clean', '0',
  'until', now + tonumber(ARGV[2]) * 1000)
call('DEL', KEYS[2])
return {string.format('%.0f', token), (not seen[2] or seen[4] == '1') and '1' or '0', owned and seen[1] or '0'}
