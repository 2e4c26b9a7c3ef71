-- Accepts messages: each waits for its tenant's turn, or until it is due, or becomes a discard when it was
-- cancelled before it came.
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
--   tombstones ZSET
--   dead HASH
--   tenant:<tenant> ZSET
--   sole HASH
--   held:<consumer> HASH
--   producer:<producer> STRING
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   producer: who numbers the messages; '' for nobody
--   marker_ttl_ms: how long its last sequence is remembered
--   head_start_us: by how much each step of priority goes before its time
--   count: number of messages, at most 1000
--   (sequence, id, record)*: the producer's number, ascending; the task id; the record
-- RETURNS
--   an array with a string per message: '1<message id>' accepted, '0<task id>' its sequence was seen before and
--   nothing changed, '2<message id>' accepted as a discard. One with a dedup key may also be '4' blocked (it waits for
--   another one to end), '5' a follower (kept, to be settled with the result of the one that covers it), '3' declined
--   (not kept) or '6' declined though somebody needs its result, because too many do; unless nobody had its key, the
--   message id is then followed by a zero byte, who covers it or is ahead of it, a zero byte, and who gave up its
--   place, ''
-- COST
--   O(log n) per message; some 15 commands and one per tenant of the call
-- GUARANTEE
--   Everything is checked before anything is written. Sending a call again with the same producer and sequences
--   changes nothing. Messages of one call and one priority keep their order. On a led queue, one that has the task
--   id of a message which its leader holds takes the place of that.
--@include state
--@include record
--@include unique
--@include accept
--@include continuation
--@include dedup
--@include wake
local producer, count = ARGV[1], tonumber(ARGV[4])
if not count or count > 1000 or #ARGV ~= 4 + 3 * count then
  return redis.error_reply('DQINVALID push: count does not fit the number of arguments')
end
local head = tonumber(ARGV[3])
if not head or not (head >= 0 and head <= 1e15) then
  return redis.error_reply('DQINVALID push: head_start_us must be from 0 to 1e15')
end

local last = -1
if producer ~= '' then last = tonumber(call('GET', P .. 'producer:' .. producer) or -1) end
local replies, messages, ids, order, seen, highest = {}, {}, {}, {}, {}, last
for i = 1, count do
  local at = 2 + 3 * i
  local sequence, record = tonumber(ARGV[at]), ARGV[at + 2]
  local priority, due, _, tenant = header(record)
  if not priority then return redis.error_reply('DQINVALID push: record ' .. i .. ' cannot be read') end
  local section = is_keyed(record) and keyed().section_of(record)
  if is_keyed(record) and not section then
    return redis.error_reply('DQINVALID push: the dedup key of record ' .. i .. ' cannot be read')
  end
  if not sequence then return redis.error_reply('DQINVALID push: sequence ' .. i .. ' is not a number') end
  if producer ~= '' and sequence <= last then
    replies[i] = '0' .. ARGV[at + 1]
    if section then seen[#seen + 1] = {i, ARGV[at + 1], tenant_name(record, tenant), section} end
  else
    if producer ~= '' and sequence <= highest then
      return redis.error_reply('DQINVALID push: sequence ' .. i .. ' does not ascend')
    end
    highest = math.max(highest, sequence)
    ids[#ids + 1] = ARGV[at + 1]
    order[#order + 1] = i
    messages[#messages + 1] = {record = record, priority = priority, due = due, tenant = tenant_name(record, tenant),
      section = section}
  end
end
for i = 1, #seen do
  local at, task, tenant, section = unpack(seen[i])
  -- The answer to the first attempt was lost: as it stands now.
  local c = call('HEXISTS', P .. 'messages', plain_id(task)) == 0
    and dedup().read_claim(keyed().scope_of(tenant, section.key))
  if c then replies[at] = '3' .. task .. '\0' .. (c.tail or c.heir or c.head) .. '\0' end
end
if #messages == 0 then return replies end

state.head = head
local stones = {}
if call('EXISTS', P .. 'tombstones') == 1 then
  local bases = {}
  for i = 1, #ids do bases[i] = plain_id(ids[i]) end
  stones = call('ZMSCORE', P .. 'tombstones', unpack(bases))
end
local unique, places = unique_ids(ids), places_of(ids)
for i = 1, #messages do
  local message = messages[i]
  message.id = unique[i]
  message.score = places[i]
  if stones[i] and tonumber(stones[i]) > now then message.reason = 'cancelled' end
  replies[order[i]] = (message.reason and '2' or '1') .. message.id
end
local CODES = {accept = '1', block = '4', follow = '5', decline = '3', refuse = '6'}
local turned_away = 0
for i = 1, #messages do
  local message = messages[i]
  if message.section and not message.reason then
    local verdict, ahead, replaced = keyed().admit(message)
    message.following = verdict == 'follow'
    message.dropped = verdict == 'decline' or verdict == 'refuse'
    if message.dropped or replaced then turned_away = turned_away + 1 end
    if ahead then replies[order[i]] = CODES[verdict] .. message.id .. '\0' .. ahead .. '\0' .. (replaced or '') end
  end
end
if turned_away > 0 then
  local kept = {}
  for i = 1, #messages do
    if not messages[i].dropped then kept[#kept + 1] = messages[i] end
  end
  messages = kept
end
accept(messages)
if producer ~= '' then call('SET', P .. 'producer:' .. producer, highest, 'PX', ARGV[2]) end
wake()
save()
return replies
