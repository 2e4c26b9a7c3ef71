-- The in-flight messages of consumers.
--
-- DERIVES
--   at_concurrency ZSET
--   held:<consumer> HASH
--@include state
--@include held_flags
--@include finish
--@uses tenant_placement
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
    tenant = string.sub(entry, TENANT_AT)}
end

-- Returns any `limit` entries of a consumer, in the order of their scores.
function dq.some_held(consumer, limit)
  local fields = call('HRANDFIELD', P .. 'held:' .. consumer, limit, 'WITHVALUES')
  local entries = {}
  for i = 1, #fields, 2 do entries[#entries + 1] = dq.read_held(fields[i], fields[i + 1]) end
  table.sort(entries, function(a, b) return a.score < b.score end)
  return entries
end

-- Returns the entries that the consumer holds under the tags in ARGV at `position`, and the number of stale tags.
function dq.read_tags(consumer, position)
  local ids, entries, stale = held_under_tags(consumer, position, state.epoch)
  for i = 1, #ids do entries[i] = dq.read_held(ids[i], entries[i]) end
  return entries, stale
end

-- Frees the slots of these entries. Returns their tenants, each once.
function dq.free_slots(entries)
  local tenants, counts = {}, {}
  for i = 1, #entries do
    local entry = entries[i]
    if not entry.discard then
      if not counts[entry.tenant] then tenants[#tenants + 1] = entry.tenant end
      counts[entry.tenant] = (counts[entry.tenant] or 0) + 1
    end
  end
  free_counted_slots(tenants, counts)
  return tenants
end

-- Deletes these messages, but does not free their slots.
function dq.erase(consumer, entries)
  local ids, discards, members = {}, {}, {}
  for i = 1, #entries do
    ids[i] = entries[i].id
    if entries[i].discard then discards[#discards + 1] = entries[i].id end
    if entries[i].fast_dedup then members[#members + 1] = entries[i].id end
  end
  delete_in_flight(consumer, ids, discards, true)
  state.held = state.held - #ids
  if #members > 0 then dq.fast_dedup().leave(members) end
end

-- What `finish_tags` leaves to do: counts, frees the dedup locks of `members`, and places those of these tenants again
-- that were at their concurrency limit.
function dq.end_finish(finished, tenants, members, settled)
  state.held = state.held - finished
  if settled > 0 then state.settled = state.settled + settled end
  if #members > 0 then dq.fast_dedup().leave(members) end
  if #tenants == 0 or call('EXISTS', P .. 'at_concurrency') == 0 then return end
  local limited = call('ZMSCORE', P .. 'at_concurrency', unpack(tenants))
  local waiting = {}
  for i = 1, #tenants do
    if limited[i] then waiting[#waiting + 1] = tenants[i] end
  end
  dq.replace(waiting)
end
