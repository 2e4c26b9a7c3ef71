-- Accepts messages: each waits for its tenant's turn, or until it is due, or becomes a discard when it was
-- cancelled before it came.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tombstones ZSET
--   dead HASH
--   producer:<producer> STRING
-- ARGV
--   producer: the producer that numbers the messages; '' for none
--   marker_ttl_ms: how long its last sequence is remembered
--   head_start_us: by how much each step of priority goes before its time
--   wall_us: the publisher's clock, from which its countdowns count
--   map: the map of the queue by which the client chose this partition, with a '!' behind it when the tenants of these
--     messages move here by it
--   count: number of messages, at most 1000
--   (sequence, id, record)*: the producer's number, ascending; the task id; the record, which may have the flag 8
-- RETURNS
--   the number of messages when each was accepted under its task id; else
--   an array with a string per message: '1<message id>' accepted, '0<task id>' its sequence was seen before and
--   nothing changed, '2<message id>' accepted as a discard. A message with a dedup key may also be '4' blocked (it
--   waits for another message to end), '5' a follower (kept, it gets the result of the message that covers it), '3'
--   declined (not kept) or '6' declined although its result is awaited, because there are too many followers. When the
--   lock was not free, behind the message id come a zero byte, the id of the message that covers it or is ahead of it,
--   a zero byte, and the id of the message that it replaced, or ''. '7<task id>' is misrouted: the queue has another
--   map, and nothing changed. '8<task id>', a zero byte, the bound, a zero byte, 'refuse' or 'wait' is full: as many
--   messages of its tenant wait as may, and it was not stored
-- COST
--   9 commands for one plain message, see `push_plain`; five more where others wait, eight where tenants have limits; else
--   O(log n) per message, some 15 commands and one per tenant of the call. Where a quota of the partition has a bound, one more,
--   and where one of these tenants has, four more, two per tenant with a bound and three per message with a dedup key that is
--   full; where messages are pushed out, some ten and four per tenant, three per dead letter and some ten per dedup key
-- GUARANTEE
--   Everything is checked before anything is written. Messages of a tenant that moves here are not served before
--   `open_tenants`. Sending a call or a part of it again with the same producer and sequences changes nothing, but stores
--   messages that were full, if there is room now. No message makes a backlog longer than its tenant's `max_waiting`, except
--   those that were accepted before: they have the flag 8 or the task id of a message that runs on a singleton queue, or had
--   waited for the dedup lock of a message that is pushed out. At most 1000 messages are pushed out. Messages of one call and
--   one priority keep their order. On a singleton queue, a message with the task id of a message that the leader holds takes
--   the place of that one.
--@include partition
local producer, wall, count = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[6])
if not count or count > 1000 or #ARGV ~= 6 + 3 * count then
  return redis.error_reply('DQINVALID push: count does not fit the number of arguments')
end
local head = tonumber(ARGV[3])
if not head or not (head >= 0 and head <= 1e15) then
  return redis.error_reply('DQINVALID push: head_start_us must be from 0 to 1e15')
end
if not wall or not (wall >= 0 and wall < 9e15) then
  return redis.error_reply('DQINVALID push: wall_us must be from 0 to 9e15')
end
--@include plain_push
if count == 1 then
  if push_plain(producer, ARGV[2], head, ARGV[5], unpack(ARGV, 7)) then return 1 end
end
local map, is_moving = string.gsub(ARGV[5], '!$', '')
--@include state
--@uses record
--@uses unique_ids
--@uses accept
--@uses retry_of
--@uses dedup
--@uses quota
--@uses backlog_bound
--@uses partition_map
--@uses wake
read_state('epoch', 'seq', 'v', 'floor', 'head', 'pushed', 'paused_until', 'partitions', 'sets', 'bounds')
-- The marker of a producer: its last sequence, and behind it those of its last call that were full.
local last, was_full = -1, {}
local marker = producer ~= '' and call('GET', P .. 'producer:' .. producer)
if marker then
  last = finite(string.match(marker, '^%S+')) or -1
  for number in string.gmatch(marker, ' (%d+)') do was_full[tonumber(number)] = true end
end
local replies, messages, ids, order, seen, highest = {}, {}, {}, {}, {}, last
for i = 1, count do
  local at = 4 + 3 * i
  local sequence, record = tonumber(ARGV[at]), ARGV[at + 2]
  local priority, due, _, tenant, flags = dq.header(record)
  if not priority then return redis.error_reply('DQINVALID push: record ' .. i .. ' cannot be read') end
  local is_accepted = false
  if flags >= 4 and flags < 16 then
    if flags % 8 >= 4 then due = math.min(math.max(due + now - wall, 1), dq.LATEST) end
    is_accepted, flags = flags >= 8, flags % 4
    record = dq.with_header(record, priority, flags, due)
  end
  local section = flags >= 2 and dq.fast_dedup().section_of(record)
  if flags >= 2 and not section then
    return redis.error_reply('DQINVALID push: the dedup key of record ' .. i .. ' cannot be read')
  end
  if not sequence then return redis.error_reply('DQINVALID push: sequence ' .. i .. ' is not a number') end
  if producer ~= '' and sequence <= last and not was_full[sequence] then
    replies[i] = '0' .. ARGV[at + 1]
    if section then seen[#seen + 1] = {i, ARGV[at + 1], dq.tenant_name(record, tenant), section} end
  else
    if producer ~= '' and sequence <= highest and not was_full[sequence] then
      return redis.error_reply('DQINVALID push: sequence ' .. i .. ' does not ascend')
    end
    highest, was_full[sequence] = math.max(highest, sequence), nil
    ids[#ids + 1] = ARGV[at + 1]
    order[#order + 1] = i
    messages[#messages + 1] = {record = record, priority = priority, due = due, tenant = dq.tenant_name(record, tenant),
      section = section, sequence = sequence, is_accepted = is_accepted}
  end
end
for i = 1, #seen do
  local at, task, tenant, section = unpack(seen[i])
  -- The answer to the first attempt was lost, so this is the present state.
  local c = call('HEXISTS', P .. 'messages', dq.plain_id(task)) == 0
    and dq.dedup().read_lock(dq.fast_dedup().scope_of(tenant, section.key))
  if c then replies[at] = '3' .. task .. '\0' .. (c.tail or c.heir or c.head) .. '\0' end
end
if #messages == 0 then return replies end
if dq.stored_map() ~= map then
  for i = 1, #messages do replies[order[i]] = '7' .. ids[i] end
  return replies
end
if is_moving > 0 then
  local tenants = {}
  for i = 1, #messages do tenants[i] = messages[i].tenant end
  dq.expect(tenants, dq.map_version(map))
end

state.head = head
local tombstones = {}
local has_past = call('EXISTS', P .. 'tombstones', P .. 'dead') > 0
if has_past then
  local bases = {}
  for i = 1, #ids do bases[i] = dq.plain_id(ids[i]) end
  tombstones = call('ZMSCORE', P .. 'tombstones', unpack(bases))
end
local unique = dq.unique_ids(ids, has_past)
local places = state.epoch > 0 and dq.places_of_retried(ids) or {}
for i = 1, #messages do
  local message = messages[i]
  message.id = unique[i]
  message.score = places[i]
  if tombstones[i] and tonumber(tombstones[i]) > now then message.reason = 'cancelled' end
  if message.reason or message.id ~= ids[i] then
    replies[order[i]] = (message.reason and '2' or '1') .. message.id
  end
end
local has_bounds, turned_away, full = state.bounds > 0 and dq.may_have_bound(messages), 0, {}
if has_bounds then dq.read_bounds(messages) end
for i = 1, #messages do
  local message, bound, policy, replaced = messages[i], nil, nil, nil
  if has_bounds and message.due <= now and not (message.reason or message.is_accepted or message.score) then
    bound, policy = dq.full_for(message)
  end
  if bound then
    turned_away, full[#full + 1] = turned_away + 1, digits(message.sequence)
    message.dropped = true
    replies[order[i]] = '8' .. ids[i] .. '\0' .. digits(bound) .. '\0' .. policy
  elseif message.section and not message.reason then
    local CODES = {accept = '1', block = '4', follow = '5', decline = '3', refuse = '6'}
    local verdict, ahead
    verdict, ahead, replaced = dq.fast_dedup().admit(message)
    message.following = verdict == 'follow'
    message.dropped = verdict == 'decline' or verdict == 'refuse'
    if message.dropped or replaced then turned_away = turned_away + 1 end
    if ahead then replies[order[i]] = CODES[verdict] .. message.id .. '\0' .. ahead .. '\0' .. (replaced or '') end
  end
  if has_bounds and not (message.dropped or message.reason) then
    dq.count_waiting(message, replaced, (message.due <= now or message.score) and not (message.following or message.blocked))
  end
end
if turned_away > 0 then
  local kept = {}
  for i = 1, #messages do
    if not messages[i].dropped then kept[#kept + 1] = messages[i] end
  end
  messages = kept
end
state.pushed = state.pushed + #messages
local is_ready = dq.accept(messages)
if #full > 0 then state.full = state.full + #full end
if has_bounds then dq.drop_overflow() end
if producer ~= '' then
  -- A call without a new sequence repeats a part of the last one, of which the other messages stay full.
  if highest == last then
    for sequence in pairs(was_full) do full[#full + 1] = digits(sequence) end
  end
  call('SET', P .. 'producer:' .. producer, table.concat({digits(highest), unpack(full)}, ' '), 'PX', ARGV[2])
end
dq.wake(is_ready)
save()
if next(replies) == nil then return count end
for i = 1, #unique do replies[order[i]] = replies[order[i]] or '1' .. unique[i] end
return replies
