-- Leads no more, and wakes one who waits for that.
--
-- KEYS
--   leader HASH: the last term
--   vacant LIST: wakes one who waits
-- DERIVES
--   none
-- ARGV
--   who: the leader
--   token: of its term
--   clean: '1' when nothing of the term runs any more, else '0'
-- RETURNS
--   '1', or '0' when this one did not lead any more; nothing was changed then
-- COST
--   five commands
-- GUARANTEE
--   The token stays.
local call = redis.call
-- A full server refuses what may need memory until a script has written something, and stays full without a leader.
call('HDEL', KEYS[1], '')
local seen = call('HMGET', KEYS[1], 'token', 'who')
if seen[2] ~= ARGV[1] or seen[1] ~= ARGV[2] then
  return '0'
end
call('HSET', KEYS[1], 'until', 0, 'clean', ARGV[3])
call('DEL', KEYS[2])
call('RPUSH', KEYS[2], '1')
return '1'
