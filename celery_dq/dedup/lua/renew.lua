-- Renews the lease of a call that runs or waits.
--
-- KEYS
--   claim HASH: head, heir and tail of the key, and who follows them
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are told
--   call: who
--   token: that of its run; '0' when it waits
--   lease_ms: how long its lease holds from now
-- RETURNS
--   1, or 0 when it is not known, or another one runs by now
-- COST
--   some five commands
-- GUARANTEE
--   The lease of another call is never touched.
--@include claim
local place, mine = find(ARGV[2])
local token = tonumber(ARGV[3])
local alive = place and (token == 0 or mine.token == token)
if alive then mine.lease = now + tonumber(ARGV[4]) * 1000 end
save(ARGV[1])
return alive and 1 or 0
