-- Counts the backlogs of the tenants of a place. Changes nothing.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   tenant:<tenant> ZSET
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   resource_sets ZSET
--   pause_ends ZSET
-- ARGV
--   place: 'turn', 'resource_sets', 'throttled', 'at_concurrency' or 'paused': the tenants that are there
--   first: rank of the first tenant there
--   count: number of tenants, at most 200
--   largest: number of tenants with the largest backlogs that the reply names
-- RETURNS
--   the number of tenants of the place, the number of tenants that were counted, the number of their messages that may
--   start now, and tenant, waiting messages, … of the largest backlogs
-- COST
--   one command per tenant with more than one message, and some ten more: at most some 210; some eight per set of
--   resources
-- GUARANTEE
--   Reads only. A message may start now if the tenant's rate and concurrency allow it, and the queue is not paused. A
--   throttled tenant counts from its next allowed time on, and a paused one from the end of its pause on, although no
--   consumer has looked since; at the concurrency limit no message may start. Of sets those count that their resources
--   in turn may take besides their own messages; the room of a resource counts once in a call.
--@include state
--@uses tenant_placement
--@uses single_message
--@uses resource_sets
local place, first, largest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local found = call('ZRANGE', P .. place, first, first + tonumber(ARGV[3]) - 1, 'WITHSCORES')
local names, backlogs = {}, {}
for i = 1, #found / 2 do names[i] = found[2 * i - 1] end
local reply = {call('ZCARD', P .. place), #names, 0}
if #names == 0 then return reply end

local singles = dq.singles_of(names)
for i = 1, #names do
  backlogs[i] = {names[i], singles[i] and 1 or call('ZCARD', P .. 'tenant:' .. names[i])}
end

-- Returns how many messages the tenant's limits let start at once.
local function allowed(quota, slots, arrival)
  local count = math.huge
  if quota.interval > 0 then count = math.floor(quota.burst - math.max(arrival - now, 0) / quota.interval) end
  if quota.concurrency > 0 then count = math.min(count, quota.concurrency - slots) end
  return math.max(count, 0)
end

-- Finds how many messages each resource in turn may take besides its own.
local rooms = {}
local function read_rooms(resources)
  local new, in_turn = {}, {}
  for i = 1, #resources do
    if not rooms[resources[i]] then
      new[#new + 1] = resources[i]
      rooms[resources[i]] = 0
    end
  end
  local tags = #new > 0 and call('ZMSCORE', P .. 'turn', unpack(new)) or {}
  for i = 1, #new do
    if tags[i] then in_turn[#in_turn + 1] = new[i] end
  end
  if #in_turn == 0 then return end
  local quotas, slots, arrivals = dq.standing_of(in_turn)
  local own = dq.singles_of(in_turn)
  for i = 1, #in_turn do
    local most = allowed(quotas[i], slots[i] or 0, tonumber(arrivals[i] or 0))
    if most > 0 then
      local waiting = own[i] and 1 or call('ZCARD', P .. 'tenant:' .. in_turn[i])
      rooms[in_turn[i]] = math.max(most - waiting, 0)
    end
  end
end

-- Returns how many messages of these sets may start together. Sets with fewer resources come first, and each takes the
-- room of the resources that the fewest further sets name first.
local function allowed_by_resources()
  local sets, sharing, count = {}, {}, 0
  for i = 1, #names do
    local resources = dq.resources_of(names[i]) or {}
    read_rooms(resources)
    for j = 1, #resources do sharing[resources[j]] = (sharing[resources[j]] or 0) + 1 end
    sets[i] = {resources, backlogs[i][2]}
  end
  table.sort(sets, function(one, other) return #one[1] < #other[1] end)
  for i = 1, #sets do
    local resources, left = unpack(sets[i])
    for j = 1, #resources do sharing[resources[j]] = sharing[resources[j]] - 1 end
    table.sort(resources, function(one, other) return sharing[one] < sharing[other] end)
    for j = 1, #resources do
      local taken = math.min(left, rooms[resources[j]])
      rooms[resources[j]], left, count = rooms[resources[j]] - taken, left - taken, count + taken
    end
  end
  return count
end

-- Returns for each tenant when it may start messages again, by the clock.
local function starts()
  local times = {}
  if place == 'throttled' then
    for i = 1, #names do times[i] = tonumber(found[2 * i]) end
  elseif place == 'turn' then
    for i = 1, #names do times[i] = now end
  elseif place == 'paused' and state.resume_at > 0 and state.resume_at <= now then
    local ends = call('ZMSCORE', P .. 'pause_ends', unpack(names))
    for i = 1, #names do times[i] = tonumber(ends[i] or nil) end
  end
  return times
end

if place == 'resource_sets' and state.paused_until <= now then
  reply[3] = allowed_by_resources()
end
local times = state.paused_until > now and {} or starts()
if (times[1] or 0) <= now and next(times) then
  local quotas, slots, arrivals = dq.standing_of(names)
  for i = 1, #names do
    if times[i] and times[i] <= now and not quotas[i].is_paused_by_quota then
      local most = allowed(quotas[i], slots[i] or 0, tonumber(arrivals[i] or 0))
      reply[3] = reply[3] + math.min(backlogs[i][2], most)
    end
  end
end

if largest > 0 then
  table.sort(backlogs, function(one, other) return one[2] > other[2] end)
  for i = 1, math.min(largest, #backlogs) do
    reply[#reply + 1] = backlogs[i][1]
    reply[#reply + 1] = backlogs[i][2]
  end
end
return reply
