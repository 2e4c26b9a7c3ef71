--@include state
--@include place
--@include epoch
--@include dedup
-- What consumers hold: message id -> claim number, score, claimed at, flags, what its tenant's turn was charged for
-- it (virtual time; 0 when it took no turn), tenant. The flag `SETTLED` means
-- never to be delivered again, `DISCARD` that it was delivered to be discarded and took neither token nor slot,
-- `EARLY` that it was taken by name before it was due, and `KEYED` that its record has a dedup key.
local SETTLED, DISCARD, EARLY = 1, 2, 4

local function pack_held(claim, score, since, flags, charge, tenant)
  return struct.pack('>dddBdc0', claim, score, since, flags, charge, tenant)
end

local function read_held(id, entry)
  local claim, score, since, flags, charge = struct.unpack('>dddBd', entry)
  return {id = id, claim = claim, score = score, since = since, charge = charge, settled = flags % 2 == 1,
    discard = flags % EARLY >= DISCARD, early = flags % KEYED >= EARLY, keyed = flags >= KEYED,
    tenant = string.sub(entry, 34)}
end

-- Up to `limit` entries of a consumer, whichever, in the order of their scores.
local function some_held(consumer, limit)
  local fields = call('HRANDFIELD', P .. 'held:' .. consumer, limit, 'WITHVALUES')
  local entries = {}
  for i = 1, #fields, 2 do entries[#entries + 1] = read_held(fields[i], fields[i + 1]) end
  table.sort(entries, function(a, b) return a.score < b.score end)
  return entries
end

-- Reads `n, (claim number, id)*` from ARGV at `position`. Returns the entries that are held under exactly
-- these tags, the number of stale ones, and the position behind. To who is fenced out all are stale.
local function read_tags(consumer, position)
  local n = tonumber(ARGV[position])
  local behind = position + 1 + 2 * n
  if n == 0 then return {}, 0, behind end
  if is_fenced_out(consumer) then return {}, n, behind end
  local ids = {}
  for i = 1, n do ids[i] = ARGV[position + 2 * i] end
  local entries = call('HMGET', P .. 'held:' .. consumer, unpack(ids))
  local found, seen, stale = {}, {}, 0
  for i = 1, n do
    local entry = entries[i] and not seen[ids[i]] and read_held(ids[i], entries[i])
    if entry and entry.claim == tonumber(ARGV[position + 2 * i - 1]) then
      found[#found + 1] = entry
      seen[ids[i]] = true
    else
      stale = stale + 1
    end
  end
  return found, stale, behind
end

-- Frees the slots of these entries. Returns the tenants, each once.
local function free_slots(entries)
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

local function settle(consumer, entries)
  local marks, held = {}, {}
  for i = 1, #entries do
    local entry = entries[i]
    if not entry.settled then
      entry.settled = true
      marks[#marks + 1] = entry.id
      marks[#marks + 1] = '\0' .. consumer
      held[#held + 1] = entry.id
      held[#held + 1] = pack_held(entry.claim, entry.score, entry.since,
        SETTLED + (entry.discard and DISCARD or 0) + (entry.keyed and KEYED or 0), entry.charge, entry.tenant)
    end
  end
  write('HSET', P .. 'held:' .. consumer, held)
  write('HSET', P .. 'messages', marks)
end

-- Deletes every trace of these messages but their slots.
local function erase(consumer, entries)
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
  local claimants = {}
  for i = 1, #entries do
    if entries[i].keyed then claimants[#claimants + 1] = entries[i].id end
  end
  if #claimants > 0 then keyed().leave(claimants) end
end

-- Done with: frees the slots, and lets tenants that were at their concurrency go on.
local function finish(consumer, entries)
  if #entries == 0 then return end
  erase(consumer, entries)
  local tenants = free_slots(entries)
  if #tenants == 0 then return end
  if call('EXISTS', P .. 'limited') == 0 then return end
  local limited = call('ZMSCORE', P .. 'limited', unpack(tenants))
  local waiting = {}
  for i = 1, #tenants do
    if limited[i] then waiting[#waiting + 1] = tenants[i] end
  end
  replace(waiting)
end
