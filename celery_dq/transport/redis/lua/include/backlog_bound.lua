-- The bound of a tenant's backlog, `max_waiting` of its quota.
--
-- DERIVES
--   messages HASH
--   single HASH
--   tenant:<tenant> ZSET
--   deliveries HASH
--@include state
--@uses record
--@uses quota
--@uses dead_letter
--@uses discard
--@uses single_message
--@uses dedup
-- A push keeps it. What comes back (a retry, a message of a lost worker, a delayed or blocked one whose time has come, one
-- that moves here) was accepted before and is not refused, so a backlog may be above its bound. The field `bounds` of the
-- state is 1 once a quota of the partition has had a bound, see `note_bound`.
--
-- What a push does when the tenant is at its bound: the places in `WHEN_FULL` of `quota.py`.
local REFUSE, WAIT, DEAD_LETTER = 0, 1, 3
local MOST_DROPPED = 1000

-- The tenants of this call that have a bound, in the order of their messages; and per tenant its quota, how many messages
-- wait, and how many this call adds.
local bounded, quotas, waiting, coming = {}, {}, {}, {}

local function backlog_of(tenant)
  return call('HEXISTS', P .. 'single', tenant) + call('ZCARD', P .. 'tenant:' .. tenant)
end

-- Reads the bounds of the tenants of these messages.
function dq.read_bounds(messages)
  local tenants, seen = {}, {}
  for i = 1, #messages do
    local tenant = messages[i].tenant
    if not seen[tenant] then
      seen[tenant], tenants[#tenants + 1] = true, tenant
    end
  end
  local found = dq.quotas_of(tenants)
  for i = 1, #tenants do
    local tenant, quota = tenants[i], found[i]
    if quota.max_waiting > 0 then
      bounded[#bounded + 1], quotas[tenant] = tenant, quota
      waiting[tenant], coming[tenant] = backlog_of(tenant), 0
    end
  end
end

local function waits_for_its_turn(tenant, id)
  local mate = dq.fast_dedup().admitted[id]
  if mate then return mate.is_counted end
  if call('ZSCORE', P .. 'tenant:' .. tenant, id) then return true end
  local single = call('HGET', P .. 'single', tenant)
  return single and dq.read_single(single) == id
end

-- Returns the bound of a tenant and 'refuse' or 'wait' when a new message would exceed the bound and is not to be let in,
-- else nil. A message with a dedup key exceeds no bound when another one covers it, when it waits behind that one, and
-- when it takes the place of one that waits for its turn.
function dq.full_for(message)
  local tenant, section = message.tenant, message.section
  local quota = quotas[tenant]
  if not quota or quota.when_full > WAIT or waiting[tenant] + coming[tenant] < quota.max_waiting then return nil end
  local lock = section and dq.dedup().read_lock(dq.fast_dedup().scope_of(tenant, section.key))
  -- A lock whose message another program has removed is free.
  if lock and (dq.fast_dedup().admitted[lock.head] or call('HEXISTS', P .. 'messages', lock.head) == 1) then
    local takes_place = lock.number == 0 and section.flags % 2 == 1 and not (lock.heir or lock.tail)
    if not takes_place or waits_for_its_turn(tenant, lock.head) then return nil end
  end
  return quota.max_waiting, quota.when_full == REFUSE and 'refuse' or 'wait'
end

-- Counts a message that is stored. `waits`: it waits for its turn. `replaced`: the id of the message whose place it took.
function dq.count_waiting(message, replaced, waits)
  local tenant = message.tenant
  if not quotas[tenant] then return end
  local mate = replaced and dq.fast_dedup().admitted[replaced]
  if mate and mate.is_counted then
    coming[tenant] = coming[tenant] - 1
  elseif replaced then
    waiting[tenant] = backlog_of(tenant)
  end
  message.is_counted = waits
  if waits then coming[tenant] = coming[tenant] + 1 end
end

-- Adds the first `count` messages of a backlog to `discards`, and the ids of those with a dedup key to `keyed`. Those that
-- cannot be read become dead letters, and their ids are added to `unreadable`.
local function drop_first(tenant, count, is_kept, discards, keyed, unreadable)
  local ids = call('ZRANGE', P .. 'tenant:' .. tenant, '0', text(count - 1))
  local records, crashes = call('HMGET', P .. 'messages', unpack(ids)), call('HMGET', P .. 'deliveries', unpack(ids))
  for i = 1, #ids do
    local id, record, deliveries = ids[i], records[i], finite(crashes[i]) or 0
    if dq.header(record) then
      if is_kept then dq.store_dead_letter(id, record, 'overflow', '', deliveries, tenant) end
      discards[#discards + 1] = {id = id, tenant = tenant, reason = is_kept and 'dead:overflow' or 'overflow'}
      if dq.is_keyed(record) then keyed[#keyed + 1] = id end
    elseif record then
      dq.store_dead_letter(id, record, 'corrupt', '', deliveries, tenant)
      unreadable[#unreadable + 1] = id
    else
      dq.set_aside_waiting(tenant, id)
    end
  end
end

-- Makes discards of the first messages of those backlogs that have become too long, if their quota asks for it. It drops as
-- many from each as this call adds to it, and more where there were too many before, at most MOST_DROPPED together.
function dq.drop_overflow()
  local spare, counts, discards, keyed, unreadable = MOST_DROPPED, {}, {}, {}, {}
  for i = 1, #bounded do spare = spare - coming[bounded[i]] end
  for i = 1, #bounded do
    local tenant = bounded[i]
    local quota, added, count = quotas[tenant], coming[tenant], 0
    if quota.when_full > WAIT and waiting[tenant] + added > quota.max_waiting then
      -- Fewer wait than were counted where the entry of a single message was damaged.
      count = math.min(call('ZCARD', P .. 'tenant:' .. tenant) - quota.max_waiting, added + spare)
    end
    if count > 0 then
      spare = spare - math.max(count - added, 0)
      counts[tenant] = count
      drop_first(tenant, count, quota.when_full == DEAD_LETTER, discards, keyed, unreadable)
    end
  end
  if next(counts) == nil then return end
  dq.add_discards(discards)
  for tenant, count in pairs(counts) do call('ZREMRANGEBYRANK', P .. 'tenant:' .. tenant, '0', text(count - 1)) end
  write('HDEL', P .. 'messages', unreadable)
  write('HDEL', P .. 'deliveries', unreadable)
  state.overflowed, state.dropped = state.overflowed + #discards, state.dropped + #unreadable
  for i = 1, #keyed do dq.dedup().leave(keyed[i], false) end
end
