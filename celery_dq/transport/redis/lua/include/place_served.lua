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
local turns = dq.turns
local function has_more(tenant)
  local ids = tenant.ids
  if ids and tenant.next_id <= #ids / 2 then return true end
  return not tenant.ended and call('ZCARD', tenant.key) > tenant.taken
end

-- Returns the entry in `running` of a tenant of which this claim took `served` messages and left some. The first such
-- claim begins the counts and is not in them; so does one before the window, after the server's clock has jumped back. The
-- first one after the end of a window begins another.
local function count_claimed(entry, slots, served)
  if not entry or #entry ~= COUNTED or struct.unpack('>d', entry, 9) > now then
    return struct.pack(RUNNING, slots, now, 0, now, 0)
  end
  local _, since, count, before, count_before = struct.unpack(RUNNING, entry)
  count = count + served
  if now - since >= CLAIM_WINDOW then since, count, before, count_before = now, 0, since, count end
  return struct.pack(RUNNING, slots, since, count, before, count_before)
end

-- Adds what is to be written of one tenant that was looked at.
local function place_tenant(changes, tenant)
  local name, entries, leave, into = tenant.name, changes.entries, changes.leave, changes.into
  local has_own = has_more(tenant)
  local has_backlog = has_own or dq.has_sets(name)
  if tenant.served > 0 then
    entries[#entries + 1] = name
    if has_backlog then
      entries[#entries + 1] = count_claimed(tenant.entry, tenant.slots, tenant.served)
      changes.leaves_backlog = true
    else
      entries[#entries + 1] = text(tenant.slots)
    end
    if tenant.quota.interval > 0 then
      changes.arrivals[#changes.arrivals + 1] = text(tenant.arrival)
      changes.arrivals[#changes.arrivals + 1] = name
    end
  end
  local place, score
  if has_backlog then place, score = dq.place_of(tenant.quota, tenant.slots, tenant.arrival) end
  if not has_own then
    local list = tenant.single and changes.singles or changes.emptied
    list[#list + 1] = tenant.single and name or tenant.key
    tenant.taken = 0
    if tenant.served == 0 and tenant.entry and not has_backlog then changes.idle[#changes.idle + 1] = name end
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
  for i = 1, #turns.seen do
    local tenant, places = turns.seen[i], {}
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

-- Returns whether a tenant that was served has a backlog, and whether no tenant is in turn for sure. With `has_rare`,
-- which does not say so, the claim may still place others.
function dq.place_served(has_rare)
  local resources = state.sets > 0 and leave_sets() or {}
  local into = {turn = {}, throttled = {}, at_concurrency = {}, paused = {}, finish_tags = {}}
  local changes = {entries = {}, arrivals = {}, leave = {}, emptied = {}, singles = {}, idle = {}, into = into,
    leaves_backlog = false}
  for i = 1, #turns.seen do place_tenant(changes, turns.seen[i]) end
  local entries, singles, leave, gone = changes.entries, changes.singles, changes.leave, turns.gone
  for i = 1, #gone.names do
    local name, tag = gone.names[i], gone.tags[i]
    entries[#entries + 1] = name
    entries[#entries + 1] = text(gone.slots[i])
    singles[#singles + 1] = name
    leave[#leave + 1] = name
    if tag > state.floor then state.floor = tag end
  end
  write('HSET', P .. 'running', entries)
  if #changes.idle > 0 then dq.stop_counting(changes.idle) end
  write('ZADD', P .. 'limiter', changes.arrivals)
  write('ZADD', P .. 'throttled', into.throttled)
  write('ZADD', P .. 'paused', into.paused)
  local all_leave = #leave == #turns.seen + #gone.names
  local is_over = all_leave and turns.complete and turns.next_unserved > #turns.names and #into.turn == 0 and state.sets == 0
    and not has_rare
  if is_over then
    -- Virtual time passes these tags at once.
    for i = 1, #into.finish_tags, 2 do state.v = math.max(state.v, tonumber(into.finish_tags[i])) end
  else
    write('ZADD', P .. 'finish_tags', into.finish_tags)
  end
  write('ZADD', P .. 'at_concurrency', into.at_concurrency)
  write('ZADD', P .. 'turn', into.turn)
  if #leave > 0 and all_leave then
    -- All of the first tenants leave, so one command removes them by rank.
    call('ZREMRANGEBYRANK', P .. 'turn', '0', text(#leave - 1))
  else
    write('ZREM', P .. 'turn', leave)
  end
  for i = 1, #turns.seen do
    local tenant = turns.seen[i]
    if tenant.taken > 0 then call('ZREMRANGEBYRANK', tenant.key, '0', text(tenant.taken - 1)) end
  end
  if #changes.emptied > 0 then call('UNLINK', unpack(changes.emptied)) end
  write('HDEL', P .. 'single', singles)
  -- The others that could have taken the last message of a set.
  dq.replace(resources)
  return changes.leaves_backlog, is_over
end
