-- Returns messages to the places where they waited.
--
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   limiter ZSET
--   delayed ZSET
--   discards ZSET
--   deliveries HASH
--   held:<consumer> HASH
--   tombstones ZSET
--   dead HASH
--@include state
--@uses record
--@uses message_ids
--@uses dead_letter
--@uses in_flight
--@uses refund_permits
--@uses discard
-- Returns messages of a consumer to their old places, frees their slots and places their tenants again. `mode` is
-- 'unstarted' (the rate limit gets its permit back), 'requeue', 'paused' (as 'requeue', but the next delivery has no mark
-- of this one), or 'crashed' (the delivery counts). The tenant of an unstarted message gets its turn back. So does that
-- of a message with its first crash, because another message may have caused it; at later crashes the turn is spent.
function dq.release_messages(consumer, entries, mode, max_deliveries, worker)
  if #entries == 0 then return end
  local ids, bases = {}, {}
  for i = 1, #entries do
    ids[i] = entries[i].id
    bases[i] = dq.base_id(ids[i])
  end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local tombstones = call('ZMSCORE', P .. 'tombstones', unpack(bases))
  local crashes = call('HMGET', P .. 'deliveries', unpack(ids))
  local waiting, delayed, discards, discards_again, counts = {}, {}, {}, {}, {}
  local gone, left, returned, leaving, charges = {}, {}, {}, {}, {}
  local first, served = nil, {}
  for i = 1, #entries do
    local entry, record = entries[i], records[i]
    local deliveries = finite(crashes[i]) or 0
    local reason
    -- The slot is one of `entry.tenant`. The message waits for its own tenant, which may be a set.
    local length = select(4, dq.header(record))
    entry.owner = length and dq.tenant_name(record, length) or entry.tenant
    if mode == 'crashed' and not entry.settled then
      deliveries = deliveries + 1
      counts[#counts + 1] = entry.id
      counts[#counts + 1] = deliveries
    elseif mode == 'requeue' and not entry.settled and not crashes[i] then
      -- The delivery does not count, but the next consumer sees that the message was delivered before.
      counts[#counts + 1] = entry.id
      counts[#counts + 1] = 0
    end
    local over = mode == 'crashed' and max_deliveries > 0 and deliveries >= max_deliveries
    local cancelled = tombstones[i] and tonumber(tombstones[i]) > now
    local back = entry.fast_dedup and record and not (entry.settled or entry.discard or over or cancelled)
      and dq.dedup().return_to_lock(entry, record)
    if entry.settled or not record or back == 'gone' then
      gone[#gone + 1] = entry
    elseif entry.discard then
      if over and deliveries >= 2 * max_deliveries then
        -- Its bookkeeping crashes workers, too.
        if call('HEXISTS', P .. 'dead', entry.id) == 0 then
          dq.store_dead_letter(entry.id, record, 'discard', worker, deliveries, entry.owner)
        end
        gone[#gone + 1] = entry
      else
        -- It was among the first discards, so it goes before the ones that came later.
        first = first or dq.discards_time() or math.huge
        discards_again[#discards_again + 1] = math.min(entry.score, first)
        discards_again[#discards_again + 1] = entry.id
        left[#left + 1] = entry
      end
    else
      left[#left + 1] = entry
      if over then
        dq.store_dead_letter(entry.id, record, 'max_deliveries', worker, deliveries, entry.owner)
        reason = 'dead:max_deliveries'
      elseif cancelled then
        reason = 'cancelled'
      end
      if reason then
        discards[#discards + 1] = {id = entry.id, tenant = entry.owner, reason = reason}
        if entry.fast_dedup then leaving[#leaving + 1] = entry.id end
      elseif back == 'aside' then
        reason = nil -- it lost its lock while it was in flight, and now waits behind the new head
      elseif entry.early then
        local _, due = dq.header(record)
        delayed[#delayed + 1] = due or now
        delayed[#delayed + 1] = entry.id
      else
        local list = waiting[entry.owner]
        if not list then
          list = {}
          waiting[entry.owner] = list
          served[#served + 1] = entry.owner
        end
        list[#list + 1] = entry.score
        list[#list + 1] = entry.id
        if mode == 'unstarted' or (mode == 'crashed' and deliveries == 1) then
          charges[entry.tenant] = (charges[entry.tenant] or 0) + entry.charge
        end
      end
      if mode == 'unstarted' then returned[entry.tenant] = (returned[entry.tenant] or 0) + 1 end
    end
  end
  write('HSET', P .. 'deliveries', counts)
  write('ZADD', P .. 'discards', discards_again)
  if #discards > 0 then dq.add_discards(discards) end
  write('ZADD', P .. 'delayed', delayed)
  dq.expand_singles(served)
  for tenant, list in pairs(waiting) do call('ZADD', P .. 'tenant:' .. tenant, unpack(list)) end
  local back = {}
  for i = 1, #left do back[i] = left[i].id end
  write('HDEL', P .. 'held:' .. consumer, back)
  state.held = state.held - #back
  local tenants = dq.free_slots(entries)
  local quotas = dq.quotas_of(tenants)
  for i = 1, #tenants do
    local tokens = returned[tenants[i]]
    if tokens and quotas[i].interval > 0 then
      local arrival = call('ZSCORE', P .. 'limiter', tenants[i])
      if arrival then
        arrival = tonumber(arrival) - tokens * quotas[i].interval
        if arrival > now then
          call('ZADD', P .. 'limiter', arrival, tenants[i])
        else
          call('ZREM', P .. 'limiter', tenants[i])
        end
      end
    end
  end
  -- A tenant with backlog must have a place before other functions add messages to it.
  dq.enter_new(served)
  dq.erase(consumer, gone)
  if #gone > 0 then
    state.dropped = state.dropped + #gone
    for i = 1, #gone do
      if gone[i].settled then state.settled = state.settled + 1 end
    end
  end
  for i = 1, #leaving do dq.dedup().leave(leaving[i], false) end
  dq.replace(tenants)
  if next(charges) then dq.refund_permits(charges) end
end
