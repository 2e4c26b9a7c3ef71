--@include state
--@include ids
--@include bury
--@include held
--@include refund
-- Takes messages back from a consumer to their old places, frees their slots and places their tenants anew.
-- `mode` is unstarted (the token is given back), requeue, or crashed (the delivery counts). What was not started gives
-- its turn back, and so does the first crash of a message: that was perhaps not its fault, a further one likely is.
local function give_back(consumer, entries, mode, max_deliveries, worker)
  if #entries == 0 then return end
  local ids, bases = {}, {}
  for i = 1, #entries do
    ids[i] = entries[i].id
    bases[i] = base_id(ids[i])
  end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local stones = call('ZMSCORE', P .. 'tombstones', unpack(bases))
  local crashes = call('HMGET', P .. 'deliveries', unpack(ids))
  local waiting, delayed, discards, reasons, counts = {}, {}, {}, {}, {}
  local gone, left, returned, leaving, charges = {}, {}, {}, {}, {}
  for i = 1, #entries do
    local entry, record = entries[i], records[i]
    local deliveries = tonumber(crashes[i] or 0)
    local reason
    if mode == 'crashed' and not entry.settled then
      deliveries = deliveries + 1
      counts[#counts + 1] = entry.id
      counts[#counts + 1] = deliveries
    elseif mode == 'requeue' and not entry.settled and not crashes[i] then
      -- It does not count, but whoever gets it next is told that it was delivered before.
      counts[#counts + 1] = entry.id
      counts[#counts + 1] = 0
    end
    local over = mode == 'crashed' and max_deliveries > 0 and deliveries >= max_deliveries
    local cancelled = stones[i] and tonumber(stones[i]) > now
    local back = entry.keyed and record and not (entry.settled or entry.discard or over or cancelled)
      and dedup().come_back(entry, record)
    if entry.settled or not record or back == 'gone' then
      gone[#gone + 1] = entry
    elseif entry.discard then
      if over and deliveries >= 2 * max_deliveries then
        -- Not even its bookkeeping can be done without a crash.
        if call('HEXISTS', P .. 'dead', entry.id) == 0 then
          bury(entry.id, record, 'discard', worker, deliveries, entry.tenant)
        end
        gone[#gone + 1] = entry
      else
        discards[#discards + 1] = entry.score
        discards[#discards + 1] = entry.id
        left[#left + 1] = entry
      end
    else
      left[#left + 1] = entry
      if over then
        bury(entry.id, record, 'max_deliveries', worker, deliveries, entry.tenant)
        reason = 'dead:max_deliveries'
      elseif cancelled then
        reason = 'cancelled'
      end
      if reason then
        reasons[#reasons + 1] = entry.id
        reasons[#reasons + 1] = reason
        discards[#discards + 1] = next_seq()
        discards[#discards + 1] = entry.id
        if entry.keyed then leaving[#leaving + 1] = entry.id end
      elseif back == 'aside' then
        reason = nil -- it was evicted while it was held, and waits behind another one now
      elseif entry.early then
        local _, due = header(record)
        delayed[#delayed + 1] = due or now
        delayed[#delayed + 1] = entry.id
      else
        local list = waiting[entry.tenant]
        if not list then
          list = {}
          waiting[entry.tenant] = list
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
  write('HSET', P .. 'reasons', reasons)
  write('ZADD', P .. 'discards', discards)
  write('ZADD', P .. 'delayed', delayed)
  local served = {}
  for tenant in pairs(waiting) do served[#served + 1] = tenant end
  unfold(served)
  for tenant, list in pairs(waiting) do call('ZADD', P .. 'tenant:' .. tenant, unpack(list)) end
  local back = {}
  for i = 1, #left do back[i] = left[i].id end
  write('HDEL', P .. 'held:' .. consumer, back)
  state.held = state.held - #back
  local tenants = free_slots(entries)
  local quotas = quotas_of(tenants)
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
  -- Before anything else may add to what waits: who has something waiting stands somewhere.
  enter_new(served)
  erase(consumer, gone)
  for i = 1, #leaving do dedup().leave(leaving[i], false) end
  replace(tenants)
  refund(charges)
end
