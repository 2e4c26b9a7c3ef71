-- Releases messages to their old places and frees their slots; settled messages are dropped.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   none
-- ARGV
--   consumer: the consumer that holds them
--   mode: 'unstarted' gives permit and turn back, 'requeue' neither; 'crashed' counts, and gives the turn back once
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
--   worker: the worker that gives up on it, for the dead letter
--   n: number of tags, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   number of stale tags
-- COST
--   some 30 commands, and two per tenant
-- GUARANTEE
--   A tag that is stale changes nothing. A message that was cancelled while it was in flight, or is dead, becomes a
--   discard. Any other message has its old score, and so its old place.
--@include state
--@include out_of_memory_guard
--@uses release
--@uses wake
local mode = ARGV[2]
if mode ~= 'unstarted' and mode ~= 'requeue' and mode ~= 'crashed' then
  return redis.error_reply('DQINVALID release: mode must be unstarted, requeue or crashed')
end
read_state('epoch', 'held', 'v', 'floor', 'released', 'sets')
local entries, stale = dq.read_tags(ARGV[1], 5)
if #entries > 0 then
  dq.release_messages(ARGV[1], entries, mode, tonumber(ARGV[3]), ARGV[4])
  state.released = state.released + #entries
  dq.wake()
  save()
end
return stale
