-- Renews the lease of a call that runs or waits.
--
-- KEYS
--   dedup_lock HASH: head, heir and tail of the key, and their followers
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are woken
--   call: the name of the call
--   token: the token of its run; '0' when it waits
--   lease_ms: how long its lease holds from now
-- RETURNS
--   1, or 0 when the call is unknown, or another call runs
-- COST
--   some five commands
-- GUARANTEE
--   The lease of another call never changes.
--@include dedup_lock
local place, mine = find(ARGV[2])
local token = tonumber(ARGV[3])
local alive = place and (token == 0 or mine.token == token)
if alive then mine.lease = now + tonumber(ARGV[4]) * 1000 end
save(ARGV[1])
return alive and 1 or 0
