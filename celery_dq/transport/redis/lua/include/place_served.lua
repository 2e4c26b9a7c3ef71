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
--@include state
--@uses tenant_placement
--@uses fair_turn
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
  if has_more(tenant) then
    place, score = dq.place_of(tenant.quota, tenant.slots, tenant.arrival)
  else
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

function dq.place_served()
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
end
