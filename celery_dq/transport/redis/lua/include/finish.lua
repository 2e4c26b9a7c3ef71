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

-- Deletes the messages of the tags in ARGV at `position`, and frees their slots. Returns the number of stale tags, the
-- position behind them, and the messages that have `ended`: their `count`, how many of them were `discards` and
-- `settled`, their `tenants`, and the ids of `members`, those with a dedup key. `end_finish` does what is left to do.
local function finish_tags(consumer, position, epoch)
  local ids, entries, stale, behind = held_under_tags(consumer, position, epoch)
  local discards, members, tenants, counts, settled = {}, {}, {}, {}, 0
  for i = 1, #ids do
    local flags, tenant = string.byte(entries[i], FLAGS_AT), string.sub(entries[i], TENANT_AT)
    settled = settled + flags % 2
    if flags >= KEYED then members[#members + 1] = ids[i] end
    if flags % EARLY >= DISCARD then
      discards[#discards + 1] = ids[i]
    else
      if not counts[tenant] then tenants[#tenants + 1] = tenant end
      counts[tenant] = (counts[tenant] or 0) + 1
    end
  end
  delete_in_flight(consumer, ids, discards)
  free_counted_slots(tenants, counts)
  return stale, behind, {count = #ids, discards = #discards, settled = settled, tenants = tenants, members = members}
end

-- Returns the field `ended` of the state with these messages added. It holds three numbers of six bytes: messages that have
-- run to their end, discards that were recorded, and messages of both kinds that were settled.
local function add_ended(field, ended)
  if not field or #field ~= 18 then field = string.rep('\0', 18) end
  local run, recorded, settled = struct.unpack('>I6I6I6', field)
  return struct.pack('>I6I6I6', run + ended.count - ended.discards, recorded + ended.discards, settled + ended.settled)
end
