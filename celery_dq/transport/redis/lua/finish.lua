-- Finishes messages, settled or not: deletes them, frees their slots, and places their tenants again.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   delayed ZSET
--   discards ZSET
--   wake LIST
-- ARGV
--   consumer: the consumer that holds them
--   n: number of tags, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   10 commands, and some 10 when a message is due later or a tenant is at a limit
-- GUARANTEE
--   A tag that is stale changes nothing. A slot is freed in the same step in which its message is deleted.
--@include finish
local known = call('HMGET', KEYS[1], 'epoch', 'held', 'evict', 'next_look_owner', 'finished', 'discards_finished',
  'settled')
-- Its first write deletes messages, so the script also runs on a server that is out of memory.
local stale, _, ended = finish_tags(ARGV[1], 2, tonumber(known[1] or 0))
if ended.count == 0 then return stale end
-- When no message is due later and no tenant is at a limit, only those in turn can need a worker.
if #ended.members == 0 and (known[3] or '0') == '0' and (known[4] or '') == ''
  and call('EXISTS', P .. 'discards', P .. 'delayed', P .. 'throttled', P .. 'at_concurrency') == 0 then
  local changed = {'held', digits((known[2] or 0) - ended.count)}
  count_ended(changed, ended, known[5], known[6], known[7])
  write('HSET', KEYS[1], changed)
  if call('EXISTS', P .. 'turn') == 1 and call('EXISTS', P .. 'wake') == 0 then call('RPUSH', P .. 'wake', '1') end
  return stale
end
--@include state
--@uses in_flight
--@uses wake
--@ready end_finish wake
keep_state(known, 'epoch', 'held', 'evict', 'next_look_owner', 'finished', 'discards_finished', 'settled')
dq.end_finish(ended)
-- A solo worker that was busy at the time of its planned look gets its wake-up here.
dq.wake()
save()
return stale
