-- Where tenants wait: in turn, throttled, at their concurrency limit, or paused.
--
-- DERIVES
--   tenant:<tenant> ZSET
--   single HASH
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   finish_tags ZSET
--   limiter ZSET
--   running HASH
--@include state
--@include running
--@uses quota
--@uses single_message
--@uses resource_sets
-- Returns where a tenant with backlog belongs: 'paused', 'at_concurrency', 'throttled' or 'turn'; and its score there, if
-- any.
function dq.place_of(quota, slots, arrival)
  if quota.paused then return 'paused', 0 end
  if quota.concurrency > 0 and slots >= quota.concurrency then return 'at_concurrency', 0 end
  if quota.interval > 0 then
    local due = arrival - quota.tolerance
    if due > now then return 'throttled', due end
  end
  return 'turn'
end

-- Returns per tenant its quota, slots, arrival time and finish tag.
function dq.standing_of(tenants)
  local quotas = dq.quotas_of(tenants)
  local capped, rated = false, false
  for i = 1, #quotas do
    capped = capped or quotas[i].concurrency > 0
    rated = rated or quotas[i].interval > 0
  end
  local slots = capped and call('HMGET', P .. 'running', unpack(tenants)) or {}
  for i = 1, #slots do slots[i] = slots_of(slots[i]) end
  local arrivals = rated and call('ZMSCORE', P .. 'limiter', unpack(tenants)) or {}
  return quotas, slots, arrivals, dq.has_limits and call('ZMSCORE', P .. 'finish_tags', unpack(tenants)) or {}
end

-- A tenant's finish tag keeps it from coming back before its turn. Of tenants without limits and backlog only the
-- largest tag is kept, `floor`: a set of all tenants that were ever served would cost more than to serve them. No tag
-- is further away than one message at the tenant's weight. So a tenant that comes back gets its old place in the
-- order, or one a little later, and never an earlier one.
function dq.is_unlimited(quota)
  return quota.interval == 0 and quota.concurrency == 0
end

function dq.entry_tag(quota, finish)
  local tag = math.max(state.v, finish)
  if not dq.is_unlimited(quota) then return tag end
  return math.max(tag, math.min(state.floor, state.v + 1 / quota.weight))
end

-- Ends the busy period when no tenant is in turn: virtual time passes all tags, so that no tenant is ahead of
-- another. Returns whether a tenant is in turn. `is_over`: the caller knows that none is.
function dq.close_busy_period(is_over)
  if not is_over and call('EXISTS', P .. 'turn') == 1 then return true end
  state.v = math.max(state.v, state.floor)
  if not dq.has_limits then return false end
  local last = call('ZREVRANGE', P .. 'finish_tags', '0', '0', 'WITHSCORES')
  if last[2] then
    state.v = math.max(state.v, tonumber(last[2]))
    call('UNLINK', P .. 'finish_tags')
  end
  return false
end

-- Places tenants that have backlog and no place yet. Returns whether one of them is in turn.
function dq.enter_turn(tenants)
  if not dq.has_limits then
    local turn, tag = {}, text(math.max(state.v, math.min(state.floor, state.v + 1)))
    for i = 1, #tenants do
      turn[2 * i - 1] = tag
      turn[2 * i] = tenants[i]
    end
    call('ZADD', P .. 'turn', unpack(turn))
    return true
  end
  local quotas, slots, arrivals, tags = dq.standing_of(tenants)
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local finished = {}
  for i = 1, #tenants do
    local place, score = dq.place_of(quotas[i], slots[i] or 0, tonumber(arrivals[i] or 0))
    if place == 'turn' then
      score = dq.entry_tag(quotas[i], tonumber(tags[i] or 0))
      if tags[i] then finished[#finished + 1] = tenants[i] end
    end
    local list = into[place]
    list[#list + 1] = text(score)
    list[#list + 1] = tenants[i]
  end
  write('ZADD', P .. 'turn', into.turn)
  write('ZADD', P .. 'throttled', into.throttled)
  write('ZADD', P .. 'at_concurrency', into.at_concurrency)
  write('ZADD', P .. 'paused', into.paused)
  write('ZREM', P .. 'finish_tags', finished)
  return #into.turn > 0
end

-- Returns the tenants that have no place: they had no backlog.
function dq.newcomers(tenants)
  local function outside(key, known)
    if #known == 0 then return known end
    local there = call('ZMSCORE', key, unpack(known))
    local others = {}
    for i = 1, #known do
      if not there[i] then others[#others + 1] = known[i] end
    end
    return others
  end
  local found = outside(P .. 'turn', tenants)
  if #found == 0 or not dq.has_limits then return found end
  if call('EXISTS', P .. 'throttled', P .. 'at_concurrency', P .. 'paused') == 0 then return found end
  return outside(P .. 'paused', outside(P .. 'at_concurrency', outside(P .. 'throttled', found)))
end

-- Places those of these tenants, all with backlog, that have no place yet. For a set, its resources are placed.
function dq.enter_new(tenants)
  local new = dq.newcomers(dq.placed_for(tenants))
  if #new > 0 then dq.enter_turn(new) end
end

-- Returns which of these tenants have backlog, wherever they are placed. In most calls none has, which one EXISTS
-- shows.
function dq.with_backlog(tenants)
  local keys, found = {}, {}
  if #tenants == 0 then return found end
  for i = 1, #tenants do keys[i] = P .. 'tenant:' .. tenants[i] end
  if state.sets == 0 and call('EXISTS', P .. 'single', unpack(keys)) == 0 then return found end
  local singles = dq.singles_of(tenants)
  for i = 1, #tenants do
    if singles[i] or call('EXISTS', keys[i]) == 1 or dq.has_sets(tenants[i]) then found[tenants[i]] = true end
  end
  return found
end

-- Adds messages to the backlog of these tenants, per tenant a list of scores and ids, and places tenants without a
-- place. Returns whether one of these tenants is in turn for sure.
function dq.add_waiting(all, waiting)
  local tenants, sets = {}, {}
  for i = 1, #all do
    local list = dq.resources_of(all[i]) and sets or tenants
    list[#list + 1] = all[i]
  end
  for i = 1, #sets do call('ZADD', P .. 'tenant:' .. sets[i], unpack(waiting[sets[i]])) end
  local resources = dq.newcomers(dq.placed_for(sets))
  local is_ready = #resources > 0 and dq.enter_turn(resources)
  if #tenants == 0 then return is_ready end
  local new = dq.newcomers(tenants)
  local backlog = dq.with_backlog(new)
  local is_new, singles, others = {}, {}, {}
  for i = 1, #new do is_new[new[i]] = true end
  for i = 1, #tenants do
    local tenant = tenants[i]
    local list = waiting[tenant]
    if is_new[tenant] and not backlog[tenant] and #list == 2 then
      singles[#singles + 1] = tenant
      singles[#singles + 1] = dq.pack_single(list[1], list[2])
    else
      others[#others + 1] = tenant
    end
  end
  if #others > 0 then dq.expand_singles(others) end
  for i = 1, #others do call('ZADD', P .. 'tenant:' .. others[i], unpack(waiting[others[i]])) end
  write('HSET', P .. 'single', singles)
  return #new > 0 and dq.enter_turn(new) or is_ready
end

-- Removes the counts of claimed messages from the entries of these tenants, which have no backlog.
function dq.stop_counting(tenants)
  local entries, kept, gone = call('HMGET', P .. 'running', unpack(tenants)), {}, {}
  for i = 1, #tenants do
    local slots = slots_of(entries[i])
    if slots == 0 then
      gone[#gone + 1] = tenants[i]
    elseif #entries[i] == COUNTED then
      kept[#kept + 1] = tenants[i]
      kept[#kept + 1] = text(slots)
    end
  end
  write('HSET', P .. 'running', kept)
  write('HDEL', P .. 'running', gone)
end

-- Places these tenants again, wherever they are now and whether they have backlog or not. For a set, its resources are
-- placed.
function dq.replace(tenants)
  if #tenants == 0 then return end
  tenants = dq.placed_for(tenants)
  local quotas, slots, arrivals, tags = dq.standing_of(tenants)
  local starts, singles = call('ZMSCORE', P .. 'turn', unpack(tenants)), dq.singles_of(tenants)
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local out = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local finish, finished, idle = {}, {}, {}
  for i = 1, #tenants do
    local tenant, place, score = tenants[i], nil, nil
    if singles[i] or call('EXISTS', P .. 'tenant:' .. tenant) == 1 or dq.has_sets(tenant) then
      place, score = dq.place_of(quotas[i], slots[i] or 0, tonumber(arrivals[i] or 0))
    else
      idle[#idle + 1] = tenant
    end
    local start = starts[i] and tonumber(starts[i])
    if place == 'turn' then
      score = start or math.max(state.v, tonumber(tags[i] or 0))
      if tags[i] then finished[#finished + 1] = tenant end
    elseif start and not place and dq.is_unlimited(quotas[i]) then
      state.floor = math.max(state.floor, start)
    elseif start and start > state.v then
      finish[#finish + 1] = start
      finish[#finish + 1] = tenant
    end
    for name, list in pairs(out) do
      if name ~= place then list[#list + 1] = tenant end
    end
    if place then
      local list = into[place]
      list[#list + 1] = score
      list[#list + 1] = tenant
    end
  end
  write('ZADD', P .. 'turn', into.turn)
  write('ZADD', P .. 'throttled', into.throttled)
  write('ZADD', P .. 'at_concurrency', into.at_concurrency)
  write('ZADD', P .. 'paused', into.paused)
  write('ZADD', P .. 'finish_tags', finish)
  write('ZREM', P .. 'finish_tags', finished)
  write('ZREM', P .. 'turn', out.turn)
  write('ZREM', P .. 'throttled', out.throttled)
  write('ZREM', P .. 'at_concurrency', out.at_concurrency)
  write('ZREM', P .. 'paused', out.paused)
  if #idle > 0 then dq.stop_counting(idle) end
  dq.close_busy_period()
end
