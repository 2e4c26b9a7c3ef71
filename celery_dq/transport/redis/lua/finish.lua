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
--   some 15 commands, and one per tenant that was at its concurrency
-- GUARANTEE
--   A tag that is stale changes nothing. A slot is freed in the same step in which its message is deleted.
--@include state
--@include out_of_memory_guard
--@include in_flight
--@include wake
local entries, stale = read_tags(ARGV[1], 2)
if #entries > 0 then
  finish(ARGV[1], entries)
  wake()
  save()
end
return stale
