-- Removes what waits, is delayed or is to be discarded, a chunk a call. What is held stays.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   wake LIST
--   tenant:<tenant> ZSET
--   sole HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   limit: most messages to remove, at most 1000
-- RETURNS
--   an array of two: messages removed; '1' when there are more, else '0'
-- COST
--   some 20 commands, and three per tenant
-- GUARANTEE
--   A purged message leaves nothing behind.
--@include state
--@include full
--@include place
--@include dedup
--@include wake
local limit = math.min(tonumber(ARGV[1]), 1000)
local removed = {}
local keyed = call('EXISTS', P .. 'claims', P .. 'following') > 0
local function remove_from(key)
  local ids = call('ZRANGE', key, 0, limit - #removed - 1)
  if #ids == 0 then return end
  call('HDEL', P .. 'messages', unpack(ids))
  call('HDEL', P .. 'deliveries', unpack(ids))
  call('HDEL', P .. 'reasons', unpack(ids))
  call('ZREM', key, unpack(ids))
  for i = 1, #ids do removed[#removed + 1] = ids[i] end
end
local tenants = {}
for _, place in ipairs({'turn', 'throttled', 'limited', 'parked'}) do
  local left = limit - #removed
  if left > 0 then
    local standing = call('ZRANGE', P .. place, 0, left - 1)
    unfold(standing)
    for i = 1, #standing do
      if #removed < limit then
        remove_from(P .. 'tenant:' .. standing[i])
        tenants[#tenants + 1] = standing[i]
      end
    end
  end
end
if #removed < limit then remove_from(P .. 'delayed') end
if #removed < limit then remove_from(P .. 'discards') end
if #removed < limit then remove_from(P .. 'blocked') end
if #removed < limit and call('EXISTS', P .. 'following') == 1 then
  local ids = call('HRANDFIELD', P .. 'following', limit - #removed)
  for i = 1, #ids do dedup().unfollow(ids[i]) end
  call('HDEL', P .. 'messages', unpack(ids))
  call('HDEL', P .. 'deliveries', unpack(ids))
  for i = 1, #ids do removed[#removed + 1] = ids[i] end
end
if keyed then
  for i = 1, #removed do
    dedup().leave(removed[i], false)
    call('UNLINK', P .. 'followers:' .. removed[i])
  end
end
replace(tenants)
wake()
save()
local more = call('EXISTS', P .. 'turn', P .. 'throttled', P .. 'limited', P .. 'parked', P .. 'delayed',
  P .. 'discards', P .. 'blocked', P .. 'following')
return {tostring(#removed), more > 0 and '1' or '0'}
