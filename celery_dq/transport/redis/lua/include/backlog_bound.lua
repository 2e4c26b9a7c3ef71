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
-- state is 1 once a quota of the partition has had a bound.
--
-- What a push does when the tenant is at its bound: the places in `WHEN_FULL` of `quota.py`.
local REFUSE, WAIT, DEAD_LETTER = 0, 1, 3
local MOST_DROPPED = 1000

-- Per tenant with a bound its quota, how many messages wait, and how many this call lets in.
local quotas, waiting, coming = {}, {}, {}

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
      quotas[tenant], waiting[tenant], coming[tenant] = quota, backlog_of(tenant), 0
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
  local tenant = message.tenant
  local quota = quotas[tenant]
  if not quota or quota.when_full > WAIT or waiting[tenant] + coming[tenant] < quota.max_waiting then
    return nil
  end
  local section = message.section
  local lock = section and dq.dedup().read_lock(dq.fast_dedup().scope_of(tenant, section.key))
  if lock then
    local takes_place = lock.number == 0 and section.flags % 2 == 1 and not (lock.heir or lock.tail)
    if not takes_place or waits_for_its_turn(tenant, lock.head) then return nil end
  end
  return quota.max_waiting, quota.when_full == REFUSE and 'refuse' or 'wait'
end

-- Counts a message that will wait for its turn, and has replaced the message with this id, if any.
function dq.count_waiting(message, replaced)
  local tenant = message.tenant
  if not quotas[tenant] then return end
  message.is_counted = true
  local mate = replaced and dq.fast_dedup().admitted[replaced]
  if mate and mate.is_counted then return end
  if replaced and not mate then waiting[tenant] = backlog_of(tenant) end
  coming[tenant] = coming[tenant] + 1
end

-- Makes discards of the first messages of those backlogs that have become too long, if their quota asks for it.
function dq.drop_overflow()
  for tenant, quota in pairs(quotas) do
    local key = P .. 'tenant:' .. tenant
    local over = quota.when_full > WAIT and call('ZCARD', key) - quota.max_waiting or 0
    if over > 0 then
      local ids = call('ZRANGE', key, '0', text(math.min(over, MOST_DROPPED) - 1))
      local records, crashes = call('HMGET', P .. 'messages', unpack(ids)), call('HMGET', P .. 'deliveries', unpack(ids))
      local discards, keyed = {}, {}
      for i = 1, #ids do
        local id, record = ids[i], records[i]
        if not dq.header(record) then
          dq.set_aside_waiting(tenant, id)
        else
          local is_kept = quota.when_full == DEAD_LETTER
          if is_kept then dq.store_dead_letter(id, record, 'overflow', '', finite(crashes[i]) or 0, tenant) end
          discards[#discards + 1] = {id = id, tenant = tenant, reason = is_kept and 'dead:overflow' or 'overflow'}
          if dq.is_keyed(record) then keyed[#keyed + 1] = id end
        end
      end
      call('ZREMRANGEBYRANK', key, '0', text(#ids - 1))
      dq.add_discards(discards)
      state.overflowed = state.overflowed + #discards
      for i = 1, #keyed do dq.dedup().leave(keyed[i], false) end
    end
  end
end
