-- Takes the lead, if nobody has it.
--
-- KEYS
--   leader HASH: the last term
--   vacant LIST: wakes one who waits
-- DERIVES
--   none
-- ARGV
--   who: the candidate
--   session_ms: how long the lead is kept without a renewal
--   floor: the token will be above this one, too
--   since: wall time of the election, to show
-- RETURNS
--   an array: the token, '1' when the predecessor handed over cleanly or there was none, else '0', and the token of the
--   predecessor when that is this one, else '0'; or '0' and the µs until the present term ends when somebody else leads
-- COST
--   five commands
-- GUARANTEE
--   Tokens only grow: the hash has no time to live. Two candidates are never elected within one term.
local call = redis.call
-- A full server refuses what may need memory until a script has written something, and stays full without a leader.
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
