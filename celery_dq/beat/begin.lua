-- Numbers the next tick of an entry, before it is sent.
--
-- KEYS
--   book HASH: the shared schedule state of elected beats; see adopt
-- DERIVES
--   none
-- ARGV
--   token: the token of the term, above 0
--   entry: name of the entry
--   ran_us: time of its last run, as the caller knows it, in us
--   ran: the same time as text
-- RETURNS
--   an array: '1' and the number of the tick; or '2', the time of the last run and the number of runs, if the caller
--   knows an older run; or '0' and the current token, if a later leader has called this script
-- COST
--   three commands
-- GUARANTEE
--   Every caller gets the same number until the tick is recorded as sent, and only higher numbers after that. If a
--   caller knows a later run than this hash, the pending tick was sent without a record.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
if not token or token < 1 then return redis.error_reply('DQINVALID begin: token must be a number above 0') end
if held > token then return {'0', string.format('%.0f', held)} end
local field = 'e:' .. ARGV[2]
local form, known = '^(%d+)|(%d+)|(%-?%d+)|(%d+)|(.*)$', call('HGET', KEYS[1], field)
-- An entry that cannot be read is a new one.
if not known or not string.match(known, form) then known = '0|0|' .. ARGV[3] .. '|0|' .. ARGV[4] end
local pending, sent, ran_us, runs, ran = string.match(known, form)
-- The time of an entry that was never sent is the time of its first reading, and no run.
if sent ~= '0' and tonumber(ran_us) > tonumber(ARGV[3]) then return {'2', ran, runs} end
if pending ~= '0' and tonumber(ran_us) < tonumber(ARGV[3]) then
  sent, pending, ran_us, ran = pending, '0', ARGV[3], ARGV[4]
end
if pending == '0' then
  local clock = call('TIME')
  local number = math.max(tonumber(sent) + 1, clock[1] * 1000000 + clock[2])
  pending = string.format('%.0f', number)
end
call('HSET', KEYS[1], 'token', token, field, table.concat({pending, sent, ran_us, runs, ran}, '|'))
return {'1', pending}
