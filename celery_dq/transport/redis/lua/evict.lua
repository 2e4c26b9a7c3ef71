-- Takes a dedup lock from the message that has it, by an operator's order; the message behind it goes on.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   none
-- ARGV
--   tenant: the tenant of the key
--   key: the dedup key
-- RETURNS
--   the id of the message that had it, or ''
-- COST
--   some 20 commands
-- GUARANTEE
--   The message itself stays where it is, waiting or running, and has no lock any more.
--@include state
--@uses dedup
--@uses wake
local head = dq.dedup().evict(dq.fast_dedup().scope_of(ARGV[1], ARGV[2]))
if head then
  dq.wake()
  save()
end
return head or ''
