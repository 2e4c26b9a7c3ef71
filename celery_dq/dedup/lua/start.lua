-- A call that waits begins to run if it is its turn; a lease is renewed.
--
-- KEYS
--   claim HASH: head, heir and tail of the key, and who follows them
--   tokens STRING: the last fencing token
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are told
--   call: who
--   lease_ms: how long its lease holds from now
-- RETURNS
--   its token; '0' while it must wait; '-1' when it is not known
-- COST
--   some six commands
-- GUARANTEE
--   Starting twice gives the same token.
--@include claim
local place, mine = find(ARGV[2])
local token = -1
if place then
  mine.lease = now + tonumber(ARGV[3]) * 1000
  token = begin(ARGV[2])
end
save(ARGV[1])
return string.format('%.0f', token)
