-- Writes the usage and the new place of each tenant that a claim has looked at, and removes the messages that were
-- taken from them.
--
-- DERIVES
--   single HASH
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--   running HASH
--   rotation:<tenant> ZSET
--@include state
--@uses tenant_placement
--@uses fair_turn
--@uses serve_rotation
local line = dq.line
local function has_more(tenant)
  local ids = tenant.ids
  if ids and tenant.next_id <= #ids / 2 then return true end
  return not tenant.ended and call('ZCARD', tenant.key) > tenant.taken
end

-- Adds what is to be written of one tenant that was looked at.
local function place_tenant(changes, tenant)
  local name, slots, leave, into = tenant.name, changes.slots, changes.leave, changes.into
  if tenant.served > 0 then
    slots[#slots + 1] = name
    slots[#slots + 1] = text(tenant.slots)
    if tenant.quota.interval > 0 then
      changes.arrivals[#changes.arrivals + 1] = text(tenant.arrival)
      changes.arrivals[#changes.arrivals + 1] = name
    end
  end
  local place, score
  local has_own = has_more(tenant)
  if has_own or dq.has_sets(name) then place, score = dq.place_of(tenant.quota, tenant.slots, tenant.arrival) end
  if not has_own then
    local list = tenant.single and changes.singles or changes.emptied
    list[#list + 1] = tenant.single and name or tenant.key
    tenant.taken = 0
  end
  if place == 'turn' then
    score = tenant.tag
  else
    leave[#leave + 1] = name
    if not place and dq.is_unlimited(tenant.quota) then
      state.floor = math.max(state.floor, tenant.tag)
    elseif tenant.tag > state.v then
      into.finish_tags[#into.finish_tags + 1] = text(tenant.tag)
      into.finish_tags[#into.finish_tags + 1] = name
    end
  end
  if place and (place ~= 'turn' or tenant.served > 0) then
    local list = into[place]
    list[#list + 1] = text(score)
    list[#list + 1] = name
  end
end

-- Removes the messages that were taken from sets. Returns the resources of those that are empty now.
local function leave_sets()
  for i = 1, #line.seen do
    local tenant, places = line.seen[i], {}
    for j, name in ipairs(tenant.rotated or {}) do
      places[2 * j - 1] = digits(next_seq())
      places[2 * j] = name
    end
    if #places > 0 then call('ZADD', P .. 'rotation:' .. tenant.name, 'XX', unpack(places)) end
  end
  local resources = {}
  for name, set in pairs(dq.sets_looked_at) do
    if has_more(set) then
      if set.taken > 0 then call('ZREMRANGEBYRANK', set.key, '0', text(set.taken - 1)) end
    else
      call('UNLINK', set.key)
      dq.leave_rotations(name, set.resources)
      for i = 1, #set.resources do resources[#resources + 1] = set.resources[i] end
    end
  end
  if #resources > 0 then dq.count_sets() end
  return resources
end

function dq.place_served()
  local resources = state.sets > 0 and leave_sets() or {}
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}, finish_tags = {}}
  local changes = {slots = {}, arrivals = {}, leave = {}, emptied = {}, singles = {}, into = into}
  for i = 1, #line.seen do place_tenant(changes, line.seen[i]) end
  local slots, singles, leave, gone = changes.slots, changes.singles, changes.leave, line.gone
  for i = 1, #gone.names do
    local name, tag = gone.names[i], gone.tags[i]
    slots[#slots + 1] = name
    slots[#slots + 1] = text(gone.slots[i])
    singles[#singles + 1] = name
    leave[#leave + 1] = name
    if tag > state.floor then state.floor = tag end
  end
  write('HSET', P .. 'running', slots)
  write('ZADD', P .. 'limiter', changes.arrivals)
  write('ZADD', P .. 'throttled', into.throttled)
  write('ZADD', P .. 'paused', into.paused)
  write('ZADD', P .. 'finish_tags', into.finish_tags)
  write('ZADD', P .. 'at_concurrency', into.at_concurrency)
  write('ZADD', P .. 'turn', into.turn)
  if #leave > 0 and #leave == #line.seen + #gone.names then
    -- All of the first tenants leave, so one command removes them by rank.
    call('ZREMRANGEBYRANK', P .. 'turn', '0', text(#leave - 1))
  else
    write('ZREM', P .. 'turn', leave)
  end
  for i = 1, #line.seen do
    local tenant = line.seen[i]
    if tenant.taken > 0 then call('ZREMRANGEBYRANK', tenant.key, '0', text(tenant.taken - 1)) end
  end
  if #changes.emptied > 0 then call('UNLINK', unpack(changes.emptied)) end
  write('HDEL', P .. 'single', singles)
  -- The others that could have taken the last message of a set.
  dq.replace(resources)
end
