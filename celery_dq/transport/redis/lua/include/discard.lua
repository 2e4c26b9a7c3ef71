-- The order of the discards.
--
-- DERIVES
--   discards ZSET
--   discard_tags ZSET
--   reasons HASH
--@include state
-- Messages that will not run wait in `discards` until a worker has recorded them. Tenants take turns there by
-- start-time fair queueing, too: the score of a discard is its start tag, and each discard costs its tenant 1. No
-- limit delays a discard, so its tag is known at once and never changes. `discard_tags` keeps the start tag of each
-- tenant's next discard until virtual time, the first score in `discards`, has passed it.
function dq.discards_time()
  return tonumber(call('ZRANGE', P .. 'discards', 0, 0, 'WITHSCORES')[2] or nil)
end

-- Adds discards {id, tenant, reason}, in this order. Their records must be in `messages`.
function dq.add_discards(entries)
  if #entries == 0 then return end
  state.discarded = state.discarded + #entries
  local tenants, tags, v = {}, {}, dq.discards_time() or 0
  for i = 1, #entries do
    local tenant = entries[i].tenant
    if not tags[tenant] then tenants[#tenants + 1], tags[tenant] = tenant, v end
  end
  local known = call('ZMSCORE', P .. 'discard_tags', unpack(tenants))
  for i = 1, #tenants do tags[tenants[i]] = math.max(v, tonumber(known[i] or 0)) end
  local discards, reasons, changed = {}, {}, {}
  for i = 1, #entries do
    local entry = entries[i]
    discards[2 * i - 1] = text(tags[entry.tenant])
    discards[2 * i] = entry.id
    reasons[2 * i - 1] = entry.id
    reasons[2 * i] = entry.reason
    tags[entry.tenant] = tags[entry.tenant] + 1
    -- Those that are dead or covered by another call have counters of their own.
    local counter = entry.reason
    if counter == 'cancelled' or counter == 'expired' then state[counter] = state[counter] + 1 end
  end
  for i = 1, #tenants do
    changed[2 * i - 1] = text(tags[tenants[i]])
    changed[2 * i] = tenants[i]
  end
  call('HSET', P .. 'reasons', unpack(reasons))
  call('ZADD', P .. 'discards', unpack(discards))
  call('ZADD', P .. 'discard_tags', unpack(changed))
end

-- Removes tags that virtual time has passed, at most `limit` of them while there are discards.
function dq.tidy_discards(limit)
  local v = dq.discards_time()
  if v then
    collect(P .. 'discard_tags', v, limit)
  else
    call('UNLINK', P .. 'discard_tags')
  end
end
