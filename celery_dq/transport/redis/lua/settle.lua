-- Settles messages: they are never delivered again, and their slots stay taken until they finish.
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
--   six commands
-- GUARANTEE
--   A tag that is stale changes nothing. Settling twice is settling once.
--@include state
--@include out_of_memory_guard
--@uses in_flight
--@ready read_tags is_fenced_out read_held settle pack_held
local entries, stale = dq.read_tags(ARGV[1], 2)
dq.settle(ARGV[1], entries)
return stale
