-- Takes named messages under a lease, to move them elsewhere. They may be waiting or delayed; their order is not
-- kept.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   none
-- ARGV
--   consumer: the consumer that takes them
--   lease_ms: how long the lease holds from now
--   n: number of message ids, at most 1000
--   id*: the message ids
-- RETURNS
--   three strings per message that was taken: message id, 'claim number|0|', record. A message that is in flight, a
--   discard or gone is left out.
-- COST
--   some 15 commands, and three per message
-- GUARANTEE
--   A message that was taken counts as running until it is finished or released, but takes no permit of its tenant's
--   rate, so release it with the mode 'requeue'. A delayed message that is released is delayed again. A message with a
--   dedup key counts as running there, too: a later message of its key waits behind it and does not replace it.
--@include state
--@uses take
--@uses wake
local n, ids, named = tonumber(ARGV[3]), {}, {}
for i = 1, n do
  local id = ARGV[3 + i]
  if not named[id] then ids[#ids + 1] = id end
  named[id] = true
end
local reply = dq.take(ids, ARGV[1], tonumber(ARGV[2]))
if #reply > 0 then
  dq.wake()
  save()
end
return reply
