-- Finds the state of a task. Changes nothing.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   held:<consumer> HASH
--   tombstones ZSET
--   dead_index ZSET
--   blocked ZSET
--   following HASH
-- ARGV
--   id: the task id; the message ids '<id>~1' to '<id>~9' are looked at, too
-- RETURNS
--   an array of name, value, …, empty for an unknown task: state ('waiting', 'delayed', 'claimed', 'settled',
--   'discarded', 'blocked' (behind the lock of its dedup key), 'following' (it waits for the result of another
--   message), 'dead', 'cancelled'), id (message id), now_us, and where known: tenant, ahead (messages of the tenant
--   before it, or discards), resource (that has taken the message of a set), due_us, consumer, since_us (claimed
--   or given up on), deliveries, reason
-- COST
--   some 20 commands, and one per living consumer, at most 1000
-- GUARANTEE
--   Reads only.
--@include state
--@uses record
--@uses message_ids
--@uses in_flight
local reply = {}
local function add(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = value
end
local function digits(number) return string.format('%.0f', number) end

local function holder_of(id)
  local consumers = call('ZRANGE', P .. 'leases', 0, 999)
  for i = 1, #consumers do
    local entry = call('HGET', P .. 'held:' .. consumers[i], id)
    if entry then return consumers[i], dq.read_held(id, entry) end
  end
end

local function describe(id, record)
  local priority, due, _, length = dq.header(record)
  local tenant = priority and dq.tenant_name(record, length)
  local single = tenant and dq.singles_of({tenant})[1]
  local place = tenant and call('ZRANK', P .. 'tenant:' .. tenant, id)
  if single and dq.read_single(single) == id then place = 0 end
  if place then
    add('state', 'waiting')
    add('ahead', digits(place))
  elseif call('ZSCORE', P .. 'delayed', id) then
    add('state', 'delayed')
    add('due_us', digits(due))
  elseif call('ZSCORE', P .. 'discards', id) then
    add('state', 'discarded')
    add('reason', call('HGET', P .. 'reasons', id) or '')
    add('ahead', digits(call('ZRANK', P .. 'discards', id)))
  elseif call('ZSCORE', P .. 'blocked', id) then
    add('state', 'blocked')
  elseif call('HEXISTS', P .. 'following', id) == 1 then
    add('state', 'following')
  else
    local consumer, entry = holder_of(id)
    add('state', dq.is_settled_mark(record) and 'settled' or 'claimed')
    if consumer then
      if (tenant or entry.tenant) ~= entry.tenant then add('resource', entry.tenant) end
      tenant = tenant or entry.tenant
      add('consumer', consumer)
      add('since_us', digits(entry.since))
    end
  end
  add('id', id)
  if tenant then add('tenant', tenant) end
  add('deliveries', digits(finite(call('HGET', P .. 'deliveries', id)) or 0))
end

local ids = dq.ids_of(ARGV[1])
local records = call('HMGET', P .. 'messages', unpack(ids))
for i = 1, #ids do
  if records[i] then
    describe(ids[i], records[i])
    break
  end
end
if #reply == 0 then
  for i = 1, #ids do
    local at = call('ZSCORE', P .. 'dead_index', ids[i])
    if at then
      reply = {'state', 'dead', 'id', ids[i], 'since_us', digits(tonumber(at))}
      break
    end
  end
end
if #reply == 0 then
  local stone = call('ZSCORE', P .. 'tombstones', ids[1])
  if stone and tonumber(stone) > now then reply = {'state', 'cancelled', 'id', ids[1]} end
end
if #reply > 0 then add('now_us', digits(now)) end
return reply
