-- Finishes a message and keeps it as a dead letter.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   wake LIST
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   tenant:<tenant> ZSET
--   sole HASH
--   held:<consumer> HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   consumer: who holds it
--   claim: the claim number of its tag
--   id: the message id of its tag
--   reason: why it is given up on
--   worker: who gives up on it
--   record: what to keep; '' is the stored record
-- RETURNS
--   1 done; 0 the tag is stale; -1 a settled message has no stored record: nothing was changed
-- COST
--   some 20 commands
-- GUARANTEE
--   The dead letter is written before the message goes.
--@include state
--@include full
--@include bury
--@include held
--@include wake
local consumer, id = ARGV[1], ARGV[3]
local entry = not is_fenced_out(consumer) and call('HGET', P .. 'held:' .. consumer, id)
entry = entry and read_held(id, entry)
if not entry or entry.claim ~= tonumber(ARGV[2]) then return 0 end
local record = ARGV[6]
if record == '' then
  record = call('HGET', P .. 'messages', id)
  if not record or is_mark(record) then return -1 end
end
bury(id, record, ARGV[4], ARGV[5], tonumber(call('HGET', P .. 'deliveries', id) or 0), entry.tenant)
finish(consumer, {entry})
wake()
save()
return 1
