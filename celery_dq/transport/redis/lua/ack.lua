-- Settles messages: they are never delivered again, and their slots stay taken until they finish. Then finishes
-- messages, settled or not: deletes them, frees their slots, and places their tenants again.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   delayed ZSET
--   discards ZSET
--   deliveries HASH
--   pause_ends ZSET
--   wake LIST
-- ARGV
--   consumer: the consumer that holds them
--   n_settle: number of tags to settle, at most 1000
--   (claim, id)*: the tags
--   n_finish: number of tags to finish, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   five commands to settle; eight to finish, one more for discards, two or three when tenants are in turn, and some ten
--   when a message is due later or a tenant is at a limit; 12 for both, and eight when the tags are the same
-- GUARANTEE
--   A tag that is stale changes nothing. Settling twice is settling once. A slot is freed in the same step in which its
--   message is deleted.
--@include tags
--@include held_flags
local consumer, stale, behind = ARGV[1], 0, 3
local known = call('HMGET', KEYS[1], 'epoch', 'held', 'evict', 'next_look_owner', 'paused_until', 'settled')
local epoch, last_held, evict, next_look_owner, paused_until, last_settled = unpack(known)
epoch = tonumber(epoch or 0)
-- A message that ends needs no mark that it was settled.
local settles = are_finished_too(2)
if settles then
  behind = 3 + 2 * ARGV[2]
elseif ARGV[2] ~= '0' then
  -- Deleting messages needs no memory, but marking them as settled does.
--@include out_of_memory_guard
--@include settle
  stale, behind = settle_tags(consumer, 2, epoch)
end
-- A call that only settles does not run the definitions below.
if ARGV[behind] == '0' then return stale end
--@include finish
local others = call('EXISTS', P .. 'deliveries', P .. 'discards', P .. 'delayed', P .. 'throttled',
  P .. 'at_concurrency', P .. 'pause_ends', P .. 'turn')
local stale_finished, _, finished, tenants, members, settled = finish_tags(consumer, behind, epoch, others > 0,
  settles)
stale = stale + stale_finished
if finished == 0 then return stale end
-- When no message is due later, no tenant is at a limit and the queue is not paused, only those in turn can need a
-- worker.
local in_turn = others == 1 and call('EXISTS', P .. 'turn') or 0
if others == in_turn and #members == 0 and (evict or '0') == '0' and (next_look_owner or '') == ''
  and (paused_until or '0') == '0' and pcall(sum, last_held, last_settled) then
  local held = digits((last_held or 0) - finished)
  if settled > 0 then
    call('HSET', KEYS[1], 'held', held, 'settled', digits((last_settled or 0) + settled))
  else
    call('HSET', KEYS[1], 'held', held)
  end
  if in_turn == 1 and call('EXISTS', P .. 'wake') == 0 then
    call('RPUSH', P .. 'wake', '1')
    --@cluster call('SPUBLISH', P .. 'woken', call('ZCARD', P .. 'leases'))
  end
  return stale
end
--@include state
--@uses in_flight
--@uses wake
keep_state(known, 'epoch', 'held', 'evict', 'next_look_owner', 'paused_until', 'settled')
dq.end_finish(finished, tenants, members, settled)
-- A solo worker that was busy at the time of its planned look gets its wake-up here.
dq.wake()
save()
return stale
