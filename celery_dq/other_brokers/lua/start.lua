-- Starts a waiting call if it is its turn, and renews its lease.
--
-- KEYS
--   dedup_lock HASH: head, heir and tail of the key, and their followers
--   tokens STRING: the last fencing token
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are woken
--   call: the name of the call
--   lease_ms: how long its lease holds from now
-- RETURNS
--   the token of the run; '0' while the call must wait; '-1' when the call is unknown
-- COST
--   some six commands
-- GUARANTEE
--   Starting twice gives the same token.
--@include dedup_lock
local place, mine = find(ARGV[2])
local token = -1
if place then
  mine.lease = now + tonumber(ARGV[3]) * 1000
  token = begin(ARGV[2])
end
save(ARGV[1])
return string.format('%.0f', token)
