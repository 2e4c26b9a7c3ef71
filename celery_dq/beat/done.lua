-- Records that a tick was sent.
--
-- KEYS
--   book HASH: the shared schedule state of elected beats; see adopt
-- DERIVES
--   none
-- ARGV
--   token: the token of the term, above 0
--   entry: name of the entry
--   number: number of the tick
--   ran_us: time at which it was sent, in us
--   runs: number of runs of the entry
--   ran: the same time as ran_us, as text
-- RETURNS
--   '1', or '0' if this tick is not pending, or a later leader has called a script; then nothing was changed
-- COST
--   three commands
-- GUARANTEE
--   A record is never taken back, and an old leader changes nothing.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
local field = 'e:' .. ARGV[2]
local pending = string.match(call('HGET', KEYS[1], field) or '', '^(%d+)|')
if held > token or pending ~= ARGV[3] then return '0' end
call('HSET', KEYS[1], field, table.concat({'0', ARGV[3], ARGV[4], ARGV[5], ARGV[6]}, '|'))
return '1'
