-- The in-flight messages of consumers.
--
-- DERIVES
--   messages HASH
--   at_concurrency ZSET
--   running HASH
--   reasons HASH
--   deliveries HASH
--   held:<consumer> HASH
--@include state
--@include held_flags
--@uses tenant_placement
--@uses fencing
--@uses dedup
-- The hash of a consumer: message id -> claim number, score, claimed at, flags, charge, tenant. The charge is the
-- virtual time by which its tenant's tag moved for it, 0 when it took no turn.

function dq.pack_held(claim, score, since, flags, charge, tenant)
  return struct.pack('>dddBdc0', claim, score, since, flags, charge, tenant)
end

function dq.read_held(id, entry)
  local claim, score, since, flags, charge = struct.unpack('>dddBd', entry)
  return {id = id, claim = claim, score = score, since = since, charge = charge, settled = flags % 2 == 1,
    discard = flags % EARLY >= DISCARD, early = flags % KEYED >= EARLY, fast_dedup = flags >= KEYED,
    tenant = string.sub(entry, 34)}
end

-- Returns any `limit` entries of a consumer, in the order of their scores.
function dq.some_held(consumer, limit)
  local fields = call('HRANDFIELD', P .. 'held:' .. consumer, limit, 'WITHVALUES')
  local entries = {}
  for i = 1, #fields, 2 do entries[#entries + 1] = dq.read_held(fields[i], fields[i + 1]) end
  table.sort(entries, function(a, b) return a.score < b.score end)
  return entries
end

-- Reads `n, (claim number, id)*` from ARGV at `position`. Returns the entries that the consumer holds under these
-- tags, the number of stale tags, and the position behind them. All tags of a consumer that is fenced out are stale.
function dq.read_tags(consumer, position)
  local n = tonumber(ARGV[position])
  local behind = position + 1 + 2 * n
  if n == 0 then return {}, 0, behind end
  if dq.is_fenced_out(consumer) then return {}, n, behind end
  local ids = {}
  for i = 1, n do ids[i] = ARGV[position + 2 * i] end
  local entries = call('HMGET', P .. 'held:' .. consumer, unpack(ids))
  local found, seen, stale = {}, {}, 0
  for i = 1, n do
    local entry = entries[i] and not seen[ids[i]] and dq.read_held(ids[i], entries[i])
    if entry and entry.claim == tonumber(ARGV[position + 2 * i - 1]) then
      found[#found + 1] = entry
      seen[ids[i]] = true
    else
      stale = stale + 1
    end
  end
  return found, stale, behind
end

-- Frees the slots of these entries. Returns their tenants, each once.
function dq.free_slots(entries)
  local tenants, freed = {}, {}
  for i = 1, #entries do
    local entry = entries[i]
    if not entry.discard then
      if not freed[entry.tenant] then tenants[#tenants + 1] = entry.tenant end
      freed[entry.tenant] = (freed[entry.tenant] or 0) + 1
    end
  end
  if #tenants == 0 then return tenants end
  local slots = call('HMGET', P .. 'running', unpack(tenants))
  local fewer, none = {}, {}
  for i = 1, #tenants do
    local left = tonumber(slots[i] or 0) - freed[tenants[i]]
    if left > 0 then
      fewer[#fewer + 1] = tenants[i]
      fewer[#fewer + 1] = text(left)
    else
      none[#none + 1] = tenants[i]
    end
  end
  write('HSET', P .. 'running', fewer)
  write('HDEL', P .. 'running', none)
  return tenants
end

-- Marks these entries as settled; their slots stay taken.
function dq.settle(consumer, entries)
  local marks, held = {}, {}
  for i = 1, #entries do
    local entry = entries[i]
    if not entry.settled then
      entry.settled = true
      marks[#marks + 1] = entry.id
      marks[#marks + 1] = '\0' .. consumer
      held[#held + 1] = entry.id
      held[#held + 1] = dq.pack_held(entry.claim, entry.score, entry.since,
        SETTLED + (entry.discard and DISCARD or 0) + (entry.fast_dedup and KEYED or 0), entry.charge, entry.tenant)
    end
  end
  write('HSET', P .. 'held:' .. consumer, held)
  write('HSET', P .. 'messages', marks)
end

-- Deletes these messages, but does not free their slots.
function dq.erase(consumer, entries)
  local ids, discards = {}, {}
  for i = 1, #entries do
    ids[i] = entries[i].id
    if entries[i].discard then discards[#discards + 1] = entries[i].id end
  end
  write('HDEL', P .. 'messages', ids)
  if #ids > 0 and call('EXISTS', P .. 'deliveries') == 1 then call('HDEL', P .. 'deliveries', unpack(ids)) end
  write('HDEL', P .. 'reasons', discards)
  write('HDEL', P .. 'held:' .. consumer, ids)
  state.held = state.held - #ids
  local members = {}
  for i = 1, #entries do
    if entries[i].fast_dedup then members[#members + 1] = entries[i].id end
  end
  if #members > 0 then dq.fast_dedup().leave(members) end
end

-- Deletes these messages, frees their slots, and places tenants again that were at their concurrency limit.
function dq.finish(consumer, entries)
  if #entries == 0 then return end
  dq.erase(consumer, entries)
  local tenants = dq.free_slots(entries)
  if #tenants == 0 or call('EXISTS', P .. 'at_concurrency') == 0 then return end
  local limited = call('ZMSCORE', P .. 'at_concurrency', unpack(tenants))
  local waiting = {}
  for i = 1, #tenants do
    if limited[i] then waiting[#waiting + 1] = tenants[i] end
  end
  dq.replace(waiting)
end
