-- Takes over a schedule: says when its entries ran last, and begins to remember those that nobody has seen.
--
-- KEYS
--   book HASH: what elected beats share; field 'token', and 'e:<entry>' -> '<pending>|<sent>|<ran us>|<runs>|<ran>'
-- DERIVES
--   none
-- ARGV
--   token: of the term, above 0
--   (entry, ran_us, ran)*: name of an entry; when it ran last, or since when it is waited for: in us, and as a text
-- RETURNS
--   an array: '1', then per entry two texts: when it ran last, and how often; or only '0' and the token that holds,
--   when a later leader has been here
-- COST
--   two commands per entry
-- GUARANTEE
--   From now on no earlier token begins a tick. What is known is not changed.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
if not token or token < 1 then return redis.error_reply('DQINVALID adopt: token must be a number above 0') end
if held > token then return {'0', string.format('%.0f', held)} end
if #ARGV % 3 ~= 1 then return redis.error_reply('DQINVALID adopt: an entry is three arguments') end
call('HSET', KEYS[1], 'token', token)
local replies = {'1'}
for i = 2, #ARGV, 3 do
  local field = 'e:' .. ARGV[i]
  call('HSETNX', KEYS[1], field, '0|0|' .. ARGV[i + 1] .. '|0|' .. ARGV[i + 2])
  local runs, ran = string.match(call('HGET', KEYS[1], field), '^%d+|%d+|%-?%d+|(%d+)|(.*)$')
  replies[#replies + 1] = ran
  replies[#replies + 1] = runs
end
return replies
