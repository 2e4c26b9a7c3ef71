--@include state
--@include quota
--@include sole
-- Where a tenant with backlog belongs: `parked`, `limited`, `throttled` (and until when) or `turn`.
local function place_of(quota, slots, arrival)
  if quota.paused then return 'parked', 0 end
  if quota.concurrency > 0 and slots >= quota.concurrency then return 'limited', 0 end
  if quota.interval > 0 then
    local due = token_due(arrival, quota)
    if due > now then return 'throttled', due end
  end
  return 'turn'
end

-- What placing needs to know of each tenant: quota, slots, arrival time, finish tag.
local function standing_of(tenants)
  local quotas = quotas_of(tenants)
  local capped, rated = false, false
  for i = 1, #quotas do
    capped = capped or quotas[i].concurrency > 0
    rated = rated or quotas[i].interval > 0
  end
  local slots = capped and call('HMGET', P .. 'running', unpack(tenants)) or {}
  local arrivals = rated and call('ZMSCORE', P .. 'limiter', unpack(tenants)) or {}
  return quotas, slots, arrivals, call('ZMSCORE', P .. 'finish', unpack(tenants))
end

-- A tenant's finish tag keeps it from coming back before its turn. Of tenants that may always run and have nothing
-- left, only the largest tag is kept, `floor`: a set of all who were served once would cost more than to serve
-- them. No tag is further away than one message at the tenant's weight, so who comes back enters where it would
-- have, or a little later, and never sooner.
local function is_unlimited(quota)
  return quota.interval == 0 and quota.concurrency == 0
end

local function entry_tag(quota, finish)
  local tag = math.max(state.v, finish)
  if not is_unlimited(quota) then return tag end
  return math.max(tag, math.min(state.floor, state.v + 1 / quota.weight))
end

-- The busy period is over when no tenant is in turn: everybody is even again.
local function close_busy_period()
  if call('EXISTS', P .. 'turn') == 1 then return end
  state.v = math.max(state.v, state.floor)
  local last = call('ZREVRANGE', P .. 'finish', 0, 0, 'WITHSCORES')
  if last[2] then
    state.v = math.max(state.v, tonumber(last[2]))
    call('UNLINK', P .. 'finish')
  end
end

-- Places tenants that have backlog and stand nowhere yet.
local function enter(tenants)
  local quotas, slots, arrivals, tags = standing_of(tenants)
  local into = {turn = {}, throttled = {}, limited = {}, parked = {}}
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
  write('ZADD', P .. 'limited', into.limited)
  write('ZADD', P .. 'parked', into.parked)
  write('ZREM', P .. 'finish', finished)
end

-- Those of these tenants that stand nowhere: they had no backlog.
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
  if #tenants > 0 and call('EXISTS', P .. 'throttled', P .. 'limited', P .. 'parked') > 0 then
    outside('throttled')
    outside('limited')
    outside('parked')
  end
  return tenants
end

-- Places those of these tenants with backlog that stand nowhere yet.
local function enter_new(tenants)
  local new = newcomers(tenants)
  if #new > 0 then enter(new) end
end

-- Which of these tenants have anything waiting, wherever they stand: none, as a rule, which takes one look.
local function with_backlog(tenants)
  local keys, found = {}, {}
  if #tenants == 0 then return found end
  local soles = soles_of(tenants)
  for i = 1, #tenants do
    keys[i] = P .. 'tenant:' .. tenants[i]
    if soles[i] then found[tenants[i]] = true end
  end
  if call('EXISTS', unpack(keys)) == 0 then return found end
  for i = 1, #tenants do
    if call('EXISTS', keys[i]) == 1 then found[tenants[i]] = true end
  end
  return found
end

-- Adds to what waits for these tenants: per tenant a list of scores and ids. Tenants that stood nowhere enter.
local function add_waiting(tenants, waiting)
  local new = newcomers(tenants)
  local backlog = with_backlog(new)
  local is_new, soles, others = {}, {}, {}
  for i = 1, #new do is_new[new[i]] = true end
  for i = 1, #tenants do
    local tenant = tenants[i]
    local list = waiting[tenant]
    if is_new[tenant] and not backlog[tenant] and #list == 2 then
      soles[#soles + 1] = tenant
      soles[#soles + 1] = pack_sole(list[1], list[2])
    else
      others[#others + 1] = tenant
    end
  end
  unfold(others)
  for i = 1, #others do call('ZADD', P .. 'tenant:' .. others[i], unpack(waiting[others[i]])) end
  write('HSET', P .. 'sole', soles)
  if #new > 0 then enter(new) end
end

-- Decides anew where these tenants belong, wherever they stand and whether they have backlog or not.
local function replace(tenants)
  if #tenants == 0 then return end
  local quotas, slots, arrivals, tags = standing_of(tenants)
  local starts, soles = call('ZMSCORE', P .. 'turn', unpack(tenants)), soles_of(tenants)
  local into = {turn = {}, throttled = {}, limited = {}, parked = {}}
  local out = {turn = {}, throttled = {}, limited = {}, parked = {}}
  local finish, finished = {}, {}
  for i = 1, #tenants do
    local tenant, place, score = tenants[i], nil, nil
    if soles[i] or call('EXISTS', P .. 'tenant:' .. tenant) == 1 then
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
  write('ZADD', P .. 'limited', into.limited)
  write('ZADD', P .. 'parked', into.parked)
  write('ZADD', P .. 'finish', finish)
  write('ZREM', P .. 'finish', finished)
  write('ZREM', P .. 'turn', out.turn)
  write('ZREM', P .. 'throttled', out.throttled)
  write('ZREM', P .. 'limited', out.limited)
  write('ZREM', P .. 'parked', out.parked)
  close_busy_period()
end
