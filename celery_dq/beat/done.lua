-- Remembers that a tick was sent.
--
-- KEYS
--   book HASH: what elected beats share; see adopt
-- DERIVES
--   none
-- ARGV
--   token: of the term, above 0
--   entry: its name
--   number: of the tick
--   ran_us: when it was sent; us
--   runs: how often it was sent in all
--   ran: the same as ran_us, as a text
-- RETURNS
--   '1', or '0' when that is not the tick that is to be sent, or a later leader has been here: nothing was changed
-- COST
--   three commands
-- GUARANTEE
--   What was remembered once stays so; an old leader changes nothing.
local call = redis.call
local token, held = tonumber(ARGV[1]), tonumber(call('HGET', KEYS[1], 'token') or 0)
local field = 'e:' .. ARGV[2]
local pending = string.match(call('HGET', KEYS[1], field) or '', '^(%d+)|')
if held > token or pending ~= ARGV[3] then return '0' end
call('HSET', KEYS[1], field, table.concat({'0', ARGV[3], ARGV[4], ARGV[5], ARGV[6]}, '|'))
return '1'
