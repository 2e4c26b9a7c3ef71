-- Finishes messages, settled or not: deletes them, frees their slots, and places their tenants again.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   none
-- ARGV
--   consumer: the consumer that holds them
--   n: number of tags, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   some 12 commands, and one per tenant that was at its concurrency
-- GUARANTEE
--   A tag that is stale changes nothing. A slot is freed in the same step in which its message is deleted.
--@include state
--@uses in_flight
--@uses wake
--@ready read_tags is_fenced_out read_held finish erase free_slots wake
read_state('epoch', 'held')
local entries, stale = dq.read_tags(ARGV[1], 2)
if #entries > 0 then
  -- Its first write deletes messages, so the script also runs on a server that is out of memory.
  dq.finish(ARGV[1], entries)
  -- A solo worker that was busy at the time of its planned look gets its wake-up here.
  dq.wake()
  save()
end
return stale
