-- Numbers the next tick of an entry, before it is sent.
--
-- KEYS
--   book HASH: what elected beats share; see adopt
-- DERIVES
--   none
-- ARGV
--   token: of the term, above 0
--   entry: its name
--   ran_us: when it ran last, as the caller knows it; us
--   ran: the same as a text
-- RETURNS
--   an array: '1' and the number of the tick; '2', when it ran last and how often, when it has run since; '0' and
--   the token that holds, when a later leader has been here
-- COST
--   three commands
-- GUARANTEE
--   Until somebody says that the tick was sent, everybody gets the same number; after that, only higher ones.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
if not token or token < 1 then return redis.error_reply('DQINVALID begin: token must be a number above 0') end
if held > token then return {'0', string.format('%.0f', held)} end
local field = 'e:' .. ARGV[2]
local known = call('HGET', KEYS[1], field) or '0|0|' .. ARGV[3] .. '|0|' .. ARGV[4]
local pending, sent, ran_us, runs, ran = string.match(known, '^(%d+)|(%d+)|(%-?%d+)|(%d+)|(.*)$')
if tonumber(ran_us) > tonumber(ARGV[3]) then return {'2', ran, runs} end
if pending == '0' then
  local clock = call('TIME')
  local number = math.max(tonumber(sent) + 1, clock[1] * 1000000 + clock[2])
  pending = string.format('%.0f', number)
end
call('HSET', KEYS[1], 'token', token, field, table.concat({pending, sent, ran_us, runs, ran}, '|'))
return {'1', pending}
