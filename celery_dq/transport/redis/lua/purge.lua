-- Removes waiting and delayed messages and discards, a chunk per call. In-flight messages stay.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   resource_sets ZSET
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   dedup_locks HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
-- ARGV
--   limit: most messages to remove, at most 1000, and 200 where messages have dedup keys
-- RETURNS
--   an array of two: messages removed; '1' when there are more, else '0'
-- COST
--   some 20 commands, and ten per tenant, of which it looks at 100 at most; ten more per message with a dedup key
-- GUARANTEE
--   No key holds any part of a purged message.
--@include state
--@include out_of_memory_guard
--@uses tenant_placement
--@uses dedup
--@uses discard
--@uses wake
local MOST, MOST_KEYED, TENANTS = 1000, 200, 100
local removed = {}
local fast_dedup = call('EXISTS', P .. 'dedup_locks', P .. 'following') > 0
local limit = math.min(tonumber(ARGV[1]), fast_dedup and MOST_KEYED or MOST)
local function remove_from(key)
  local ids = call('ZRANGE', key, 0, limit - #removed - 1)
  if #ids == 0 then return end
  state.dropped = state.dropped + call('HDEL', P .. 'messages', unpack(ids))
  call('HDEL', P .. 'deliveries', unpack(ids))
  call('HDEL', P .. 'reasons', unpack(ids))
  call('ZREM', key, unpack(ids))
  for i = 1, #ids do removed[#removed + 1] = ids[i] end
end
local tenants = {}
for _, place in ipairs({'resource_sets', 'turn', 'throttled', 'at_concurrency', 'paused'}) do
  local left = math.min(limit - #removed, TENANTS - #tenants)
  if left > 0 then
    local standing = call('ZRANGE', P .. place, 0, left - 1)
    dq.expand_singles(standing)
    for i = 1, #standing do
      if #removed < limit then
        remove_from(P .. 'tenant:' .. standing[i])
        tenants[#tenants + 1] = standing[i]
      end
    end
  end
end
if #removed < limit then remove_from(P .. 'delayed') end
if #removed < limit then
  remove_from(P .. 'discards')
  dq.tidy_discards(limit)
end
if #removed < limit then remove_from(P .. 'blocked') end
if #removed < limit and call('EXISTS', P .. 'following') == 1 then
  local ids = call('HRANDFIELD', P .. 'following', limit - #removed)
  for i = 1, #ids do dq.dedup().unfollow(ids[i]) end
  state.dropped = state.dropped + call('HDEL', P .. 'messages', unpack(ids))
  call('HDEL', P .. 'deliveries', unpack(ids))
  for i = 1, #ids do removed[#removed + 1] = ids[i] end
end
if fast_dedup then
  for i = 1, #removed do
    dq.dedup().leave(removed[i], false)
    call('UNLINK', P .. 'followers:' .. removed[i])
  end
end
dq.replace(tenants)
dq.wake()
save()
local more = call('EXISTS', P .. 'turn', P .. 'throttled', P .. 'at_concurrency', P .. 'paused', P .. 'delayed',
  P .. 'discards', P .. 'blocked', P .. 'following')
return {tostring(#removed), more > 0 and '1' or '0'}
