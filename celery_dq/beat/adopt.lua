-- Takes over a schedule: returns the last runs of its entries, and adds new entries, and those that cannot be read.
--
-- KEYS
--   book HASH: the shared schedule state of elected beats; field 'token', and
--     'e:<entry>' -> '<pending>|<sent>|<ran us>|<runs>|<ran>'
-- DERIVES
--   none
-- ARGV
--   token: the token of the term, above 0
--   (entry, ran_us, ran, latest_us, latest)*: name of an entry; time of its last run, or since when the entry waits,
--     in us and as text; the latest such time that the caller accepts, in the same two forms
-- RETURNS
--   an array: '1', then two texts per entry: time of the last run, and number of runs; or only '0' and the current
--   token, if a later leader has called this script
-- COST
--   two or three commands per entry
-- GUARANTEE
--   From now on, no earlier token begins a tick. A known time is changed only if it is later than the caller accepts,
--   because a leader whose clock was ahead has written it.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
if not token or token < 1 then return redis.error_reply('DQINVALID adopt: token must be a number above 0') end
if held > token then return {'0', string.format('%.0f', held)} end
if #ARGV % 5 ~= 1 then return redis.error_reply('DQINVALID adopt: an entry is five arguments') end
call('HSET', KEYS[1], 'token', token)
local replies = {'1'}
for i = 2, #ARGV, 5 do
  local field = 'e:' .. ARGV[i]
  local form, known = '^(%d+)|(%d+)|(%-?%d+)|(%d+)|(.*)$', call('HGET', KEYS[1], field)
  if not known or not string.match(known, form) then
    known = '0|0|' .. ARGV[i + 1] .. '|0|' .. ARGV[i + 2]
    call('HSET', KEYS[1], field, known)
  end
  local pending, sent, ran_us, runs, ran = string.match(known, form)
  if tonumber(ran_us) > tonumber(ARGV[i + 3]) then
    ran = ARGV[i + 4]
    call('HSET', KEYS[1], field, table.concat({pending, sent, ARGV[i + 3], runs, ran}, '|'))
  end
  replies[#replies + 1] = ran
  replies[#replies + 1] = runs
end
return replies
