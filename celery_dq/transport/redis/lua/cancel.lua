-- Cancels tasks: a waiting or delayed message becomes a discard, every other task gets a tombstone.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   delayed ZSET
--   discards ZSET
--   tombstones ZSET
--   dedup_members HASH
--   blocked ZSET
-- ARGV
--   reason: the reason of the discards
--   tombstone_ttl_ms: how long a tombstone lasts; 0 sets none
--   n: number of tasks, at most 100
--   id*: task ids; the message ids '<id>~1' to '<id>~9' are looked at, too
-- RETURNS
--   an array with a word per task: 'claimed' (in flight; a tombstone prevents another delivery), 'waiting', 'delayed',
--   'discarded' (it was already), 'tombstone' (not here yet), 'none' (not here, no tombstone)
-- COST
--   one command per task, three per message that is found, some 20 more
-- GUARANTEE
--   A task that is pushed or released while it has a tombstone becomes a discard.
--@include state
--@include out_of_memory_guard
--@uses record
--@uses message_ids
--@uses discard
--@uses dedup
--@uses tenant_placement
--@uses wake
local reason, ttl, n = ARGV[1], tonumber(ARGV[2]) * 1000, tonumber(ARGV[3])
if n > 100 then return redis.error_reply('DQINVALID cancel: at most 100 tasks a call') end
local RANK = {none = 0, tombstone = 1, discarded = 2, delayed = 3, waiting = 4, claimed = 5}
local replies, found, tenants, seen, emptied, undelayed, tombstones = {}, {}, {}, {}, {}, {}, {}
for i = 1, n do
  local ids = dq.ids_of(ARGV[i + 3])
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local reply = 'none'
  for j = 1, #ids do
    local id, record = ids[j], records[j]
    if record then
      local priority, _, _, length = dq.header(record)
      local tenant = priority and dq.tenant_name(record, length)
      local where = 'claimed'
      if tenant then dq.expand_singles({tenant}) end
      if emptied[id] or undelayed[id] then
        where = 'discarded'
      elseif tenant and call('ZSCORE', P .. 'tenant:' .. tenant, id) then
        where = 'waiting'
        emptied[id] = tenant
        found[#found + 1] = {id = id, tenant = tenant, reason = reason}
        if not seen[tenant] then tenants[#tenants + 1] = tenant end
        seen[tenant] = true
      elseif call('ZSCORE', P .. 'delayed', id) then
        where = 'delayed'
        undelayed[id] = true
        found[#found + 1] = {id = id, tenant = tenant or '', reason = reason}
      elseif call('ZSCORE', P .. 'discards', id) then
        where = 'discarded'
      elseif call('ZREM', P .. 'blocked', id) == 1 or dq.dedup().unfollow(id) then
        where = 'waiting'
        found[#found + 1] = {id = id, tenant = tenant or '', reason = reason}
      end
      if RANK[where] > RANK[reply] then reply = where end
    end
  end
  if ttl > 0 and (reply == 'none' or reply == 'claimed') then
    tombstones[#tombstones + 1] = now + ttl
    tombstones[#tombstones + 1] = ids[1]
    if reply == 'none' then reply = 'tombstone' end
  end
  replies[i] = reply
end
write('ZADD', P .. 'tombstones', tombstones)
dq.add_discards(found)
if call('EXISTS', P .. 'dedup_members') == 1 then
  for i = 1, #found do dq.dedup().leave(found[i].id, false) end
end
for id, tenant in pairs(emptied) do call('ZREM', P .. 'tenant:' .. tenant, id) end
for id in pairs(undelayed) do call('ZREM', P .. 'delayed', id) end
dq.replace(tenants)
dq.wake()
save()
return replies
