-- Ends in-flight messages.
--
-- DERIVES
--   messages HASH
--   running HASH
--   reasons HASH
--   deliveries HASH
--   held:<consumer> HASH
--@include partition
--@include held_flags
--@include fencing
-- Deletes messages, some of them discards.
local function delete_in_flight(consumer, ids, discards)
  if #ids == 0 then return end
  call('HDEL', P .. 'messages', unpack(ids))
  if call('EXISTS', P .. 'deliveries') == 1 then call('HDEL', P .. 'deliveries', unpack(ids)) end
  write('HDEL', P .. 'reasons', discards)
  call('HDEL', P .. 'held:' .. consumer, unpack(ids))
end

-- Frees `counts[tenant]` slots of each of these tenants.
local function free_counted_slots(tenants, counts)
  if #tenants == 0 then return end
  local slots = call('HMGET', P .. 'running', unpack(tenants))
  local fewer, none = {}, {}
  for i = 1, #tenants do
    local left = (slots[i] or 0) - counts[tenants[i]]
    if left > 0 then
      fewer[#fewer + 1] = tenants[i]
      fewer[#fewer + 1] = digits(left)
    else
      none[#none + 1] = tenants[i]
    end
  end
  write('HSET', P .. 'running', fewer)
  write('HDEL', P .. 'running', none)
end

-- Reads `n, (claim number, id)*` from ARGV at `position`, deletes these messages, and frees their slots. Returns the
-- number of stale tags, the position behind the tags, how many messages were deleted, their tenants, and the ids of
-- those with a dedup key: `end_finish` does what is left to do.
local function finish_tags(consumer, position, epoch)
  local n = tonumber(ARGV[position])
  local behind = position + 1 + 2 * n
  if n == 0 then return 0, behind, 0 end
  if is_fenced_out(consumer, epoch) then return n, behind, 0 end
  local ids = {}
  for i = 1, n do ids[i] = ARGV[position + 2 * i] end
  local entries = call('HMGET', P .. 'held:' .. consumer, unpack(ids))
  local ended, discards, members, tenants, counts, seen = {}, {}, {}, {}, {}, {}
  for i = 1, n do
    local id, entry = ids[i], entries[i]
    if entry and not seen[id] and struct.unpack('>d', entry) == tonumber(ARGV[position + 2 * i - 1]) then
      local flags, tenant = string.byte(entry, FLAGS_AT), string.sub(entry, TENANT_AT)
      seen[id], ended[#ended + 1] = true, id
      if flags >= KEYED then members[#members + 1] = id end
      if flags % EARLY >= DISCARD then
        discards[#discards + 1] = id
      else
        if not counts[tenant] then tenants[#tenants + 1] = tenant end
        counts[tenant] = (counts[tenant] or 0) + 1
      end
    end
  end
  delete_in_flight(consumer, ended, discards)
  free_counted_slots(tenants, counts)
  return n - #ended, behind, #ended, tenants, members
end
