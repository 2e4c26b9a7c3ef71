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
--@include quota
--@include single_message
-- Returns where a tenant with backlog belongs: 'paused', 'at_concurrency', 'throttled' or 'turn'; and its score there, if
-- any.
local function place_of(quota, slots, arrival)
  if quota.paused then return 'paused', 0 end
  if quota.concurrency > 0 and slots >= quota.concurrency then return 'at_concurrency', 0 end
  if quota.interval > 0 then
    local due = permit_due(arrival, quota)
    if due > now then return 'throttled', due end
  end
  return 'turn'
end

-- Returns per tenant its quota, slots, arrival time and finish tag.
local function standing_of(tenants)
  local quotas = quotas_of(tenants)
  local capped, rated = false, false
  for i = 1, #quotas do
    capped = capped or quotas[i].concurrency > 0
    rated = rated or quotas[i].interval > 0
  end
  local slots = capped and call('HMGET', P .. 'running', unpack(tenants)) or {}
  local arrivals = rated and call('ZMSCORE', P .. 'limiter', unpack(tenants)) or {}
  return quotas, slots, arrivals, call('ZMSCORE', P .. 'finish_tags', unpack(tenants))
end

-- A tenant's finish tag keeps it from coming back before its turn. Of tenants without limits and backlog only the
-- largest tag is kept, `floor`: a set of all tenants that were ever served would cost more than to serve them. No tag
-- is further away than one message at the tenant's weight. So a tenant that comes back gets its old place in the
-- order, or one a little later, and never an earlier one.
local function is_unlimited(quota)
  return quota.interval == 0 and quota.concurrency == 0
end

local function entry_tag(quota, finish)
  local tag = math.max(state.v, finish)
  if not is_unlimited(quota) then return tag end
  return math.max(tag, math.min(state.floor, state.v + 1 / quota.weight))
end

-- Ends the busy period when no tenant is in turn: virtual time passes all tags, so that no tenant is ahead of
-- another.
local function close_busy_period()
  if call('EXISTS', P .. 'turn') == 1 then return end
  state.v = math.max(state.v, state.floor)
  local last = call('ZREVRANGE', P .. 'finish_tags', 0, 0, 'WITHSCORES')
  if last[2] then
    state.v = math.max(state.v, tonumber(last[2]))
    call('UNLINK', P .. 'finish_tags')
  end
end

-- Places tenants that have backlog and no place yet.
local function enter_turn(tenants)
  local quotas, slots, arrivals, tags = standing_of(tenants)
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local finished = {}
  for i = 1, #tenants do
    local place, score = place_of(quotas[i], tonumber(slots[i] or 0), tonumber(arrivals[i] or 0))
    if place == 'turn' then
      score = entry_tag(quotas[i], tonumber(tags[i] or 0))
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
end

-- Returns the tenants that have no place: they had no backlog.
local function newcomers(tenants)
  local function outside(place)
    if #tenants == 0 then return end
    local there = call('ZMSCORE', P .. place, unpack(tenants))
    local others = {}
    for i = 1, #tenants do
      if not there[i] then others[#others + 1] = tenants[i] end
    end
    tenants = others
  end
  outside('turn')
  if #tenants > 0 and call('EXISTS', P .. 'throttled', P .. 'at_concurrency', P .. 'paused') > 0 then
    outside('throttled')
    outside('at_concurrency')
    outside('paused')
  end
  return tenants
end

-- Places those of these tenants, all with backlog, that have no place yet.
local function enter_new(tenants)
  local new = newcomers(tenants)
  if #new > 0 then enter_turn(new) end
end

-- Returns which of these tenants have backlog, wherever they are placed. In most calls none has, which one EXISTS
-- shows.
local function with_backlog(tenants)
  local keys, found = {}, {}
  if #tenants == 0 then return found end
  local singles = singles_of(tenants)
  for i = 1, #tenants do
    keys[i] = P .. 'tenant:' .. tenants[i]
    if singles[i] then found[tenants[i]] = true end
  end
  if call('EXISTS', unpack(keys)) == 0 then return found end
  for i = 1, #tenants do
    if call('EXISTS', keys[i]) == 1 then found[tenants[i]] = true end
  end
  return found
end

-- Adds messages to the backlog of these tenants, per tenant a list of scores and ids, and places tenants without a
-- place.
local function add_waiting(tenants, waiting)
  local new = newcomers(tenants)
  local backlog = with_backlog(new)
  local is_new, singles, others = {}, {}, {}
  for i = 1, #new do is_new[new[i]] = true end
  for i = 1, #tenants do
    local tenant = tenants[i]
    local list = waiting[tenant]
    if is_new[tenant] and not backlog[tenant] and #list == 2 then
      singles[#singles + 1] = tenant
      singles[#singles + 1] = pack_single(list[1], list[2])
    else
      others[#others + 1] = tenant
    end
  end
  expand_singles(others)
  for i = 1, #others do call('ZADD', P .. 'tenant:' .. others[i], unpack(waiting[others[i]])) end
  write('HSET', P .. 'single', singles)
  if #new > 0 then enter_turn(new) end
end

-- Places these tenants again, wherever they are now and whether they have backlog or not.
local function replace(tenants)
  if #tenants == 0 then return end
  local quotas, slots, arrivals, tags = standing_of(tenants)
  local starts, singles = call('ZMSCORE', P .. 'turn', unpack(tenants)), singles_of(tenants)
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local out = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}}
  local finish, finished = {}, {}
  for i = 1, #tenants do
    local tenant, place, score = tenants[i], nil, nil
    if singles[i] or call('EXISTS', P .. 'tenant:' .. tenant) == 1 then
      place, score = place_of(quotas[i], tonumber(slots[i] or 0), tonumber(arrivals[i] or 0))
    end
    local start = starts[i] and tonumber(starts[i])
    if place == 'turn' then
      score = start or math.max(state.v, tonumber(tags[i] or 0))
      if tags[i] then finished[#finished + 1] = tenant end
    elseif start and not place and is_unlimited(quotas[i]) then
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
  close_busy_period()
end
