-- Hands a wake-up over: a consumer gives up the look that it has planned, messages that are due are promoted, and
-- another consumer is woken if there is work.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   discards ZSET
-- ARGV
--   consumer: the consumer that gives up its planned look; '' for none
-- RETURNS
--   1 when a message may be served now, else 0
-- COST
--   some 15 commands; promotes at most 128 of each kind
-- GUARANTEE
--   It takes no message, and wakes one consumer at most, which may find no message. There is never more than one
--   wake-up. Only the look of the named consumer is given up, so a consumer names only itself.
--@include state
--@include out_of_memory_guard
--@uses promote
--@uses wake
if state.next_look_owner == ARGV[1] then state.next_look_owner = '' end
dq.promote(128, true)
dq.wake()
save()
if call('EXISTS', P .. 'discards') == 1 then return 1 end
if state.paused_until <= now and call('EXISTS', P .. 'turn') == 1 then return 1 end
local due = dq.next_due(nil, true)
return due and due <= now and 1 or 0
