-- Removes the state of entries that the schedule has no more.
--
-- KEYS
--   book HASH: the shared schedule state of elected beats; see adopt
-- DERIVES
--   none
-- ARGV
--   token: the token of the term, above 0
--   entry*: names of the entries
-- RETURNS
--   an array: '1'; or '0' and the current token, if a later leader has called a script; then nothing was changed
-- COST
--   one command per entry
-- GUARANTEE
--   An old leader removes nothing. An entry that comes back later counts from its return.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
if not token or token < 1 then return redis.error_reply('DQINVALID retain: token must be a number above 0') end
if held > token then return {'0', string.format('%.0f', held)} end
for i = 2, #ARGV do call('HDEL', KEYS[1], 'e:' .. ARGV[i]) end
return {'1'}
