-- Ends in-flight messages.
--
-- DERIVES
--   messages HASH
--   running HASH
--   reasons HASH
--   deliveries HASH
--   held:<consumer> HASH
--@include tags
--@include held_flags
--@include running
-- Deletes messages, some of them discards. `has_deliveries` is false when the partition has no `deliveries`.
local function delete_in_flight(consumer, ids, discards, has_deliveries)
  if #ids == 0 then return end
  call('HDEL', P .. 'messages', unpack(ids))
  if has_deliveries then call('HDEL', P .. 'deliveries', unpack(ids)) end
  write('HDEL', P .. 'reasons', discards)
  call('HDEL', P .. 'held:' .. consumer, unpack(ids))
end

-- Counts discards that have ended. All other messages that end are counted by the difference of other counters (see
-- `QueueCounters.read`).
local function count_discards(count)
  if count > 0 then call('HINCRBY', KEYS[1], 'discards_finished', count) end
end

-- Frees `counts[tenant]` slots of each of these tenants.
local function free_counted_slots(tenants, counts)
  if #tenants == 0 then return end
  local entries = call('HMGET', P .. 'running', unpack(tenants))
  local fewer, none = {}, {}
  for i = 1, #tenants do
    local entry, count = entries[i], counts[tenants[i]]
    local left
    if entry and #entry == COUNTED then
      -- It has counts of claimed messages, see `running`.
      left = struct.pack('>d', math.max(struct.unpack('>d', entry) - count, 0)) .. string.sub(entry, 9)
    else
      local slots = slots_of(entry) - count
      left = slots > 0 and digits(slots) or nil
    end
    if left then
      fewer[#fewer + 1] = tenants[i]
      fewer[#fewer + 1] = left
    else
      none[#none + 1] = tenants[i]
    end
  end
  write('HSET', P .. 'running', fewer)
  write('HDEL', P .. 'running', none)
end

-- Deletes the messages of the tags in ARGV at `position`, and frees their slots. Returns the number of stale tags, the
-- position behind them, how many messages were deleted, their tenants, the ids of those with a dedup key, and how many
-- were settled: `end_finish` does what is left to do. With `settles`, these messages are settled in the same step: each
-- counts as settled, and a stale tag counts twice.
local function finish_tags(consumer, position, epoch, has_deliveries, settles)
  local ids, entries, stale, behind = held_under_tags(consumer, position, epoch)
  if settles then stale = stale + count_stale(stale) end
  if #ids == 0 then return stale, behind, 0, {}, {}, 0 end
  local discards, members, tenants, counts, settled = {}, {}, {}, {}, 0
  for i = 1, #ids do
    local flags, tenant = string.byte(entries[i], FLAGS_AT), string.sub(entries[i], TENANT_AT)
    settled = settled + (settles and 1 or flags % 2)
    if flags >= KEYED then members[#members + 1] = ids[i] end
    if flags % EARLY >= DISCARD then
      discards[#discards + 1] = ids[i]
    else
      if not counts[tenant] then tenants[#tenants + 1] = tenant end
      counts[tenant] = (counts[tenant] or 0) + 1
    end
  end
  delete_in_flight(consumer, ids, discards, has_deliveries)
  count_discards(#discards)
  free_counted_slots(tenants, counts)
  return stale, behind, #ids, tenants, members, settled
end
