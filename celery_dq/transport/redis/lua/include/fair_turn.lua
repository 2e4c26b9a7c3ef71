-- The order in which tenants are served: start-time fair queueing.
--
-- DERIVES
--   tenant:<tenant> ZSET
--   turn ZSET
--   limiter ZSET
--   running HASH
--@include state
--@include running
--@uses tenant_placement
-- The tenant with the smallest start tag is next. Of tenants with equal tags it is the one whose name is smaller byte
-- by byte, as in the sorted set `turn`. This file only reads the set: a claim writes the messages that it took before
-- it removes them.

-- Compares strings byte by byte, eight at a time. Lua's '<' would follow the locale of the server.
local function bytes_before(a, b)
  for at = 1, math.min(#a, #b), 8 do
    local a1, a2, a3, a4, a5, a6, a7, a8 = string.byte(a, at, at + 7)
    local b1, b2, b3, b4, b5, b6, b7, b8 = string.byte(b, at, at + 7)
    if a1 ~= b1 then return a1 < b1 end
    if a2 ~= b2 then return (a2 or -1) < (b2 or -1) end
    if a3 ~= b3 then return (a3 or -1) < (b3 or -1) end
    if a4 ~= b4 then return (a4 or -1) < (b4 or -1) end
    if a5 ~= b5 then return (a5 or -1) < (b5 or -1) end
    if a6 ~= b6 then return (a6 or -1) < (b6 or -1) end
    if a7 ~= b7 then return (a7 or -1) < (b7 or -1) end
    if a8 ~= b8 then return (a8 or -1) < (b8 or -1) end
  end
  return #a < #b
end

function dq.is_before(a, b)
  if a.tag ~= b.tag then return a.tag < b.tag end
  return bytes_before(a.name, b.name)
end

-- The tenants in turn:
--   names, tags, quotas, entries, arrivals, singles: a chunk of `turn`, in order
--   unserved: the tenants of this chunk that were looked at
--   gone: tenants that were served their single message and have no turn any more
--   again: tenants that were served and have another turn, in order
--   later: the same, not sorted yet: their order matters only when the smallest of their tags is reached
local turns = {names = {}, tags = {}, quotas = {}, entries = {}, arrivals = {}, singles = {}, unserved = {},
  next_unserved = 1, offset = 0, complete = false, fetched = false, seen = {},
  gone = {names = {}, tags = {}, slots = {}}, again = {}, next_again = 1, later = {}, later_tag = nil}
dq.turns = turns

function dq.read_turns(size)
  local found = call('ZRANGE', P .. 'turn', text(turns.offset), text(turns.offset + size - 1), 'WITHSCORES')
  turns.offset = turns.offset + size
  turns.complete = #found < 2 * size
  local names, tags = {}, {}
  for i = 1, #found, 2 do
    names[#names + 1] = found[i]
    tags[#tags + 1] = tonumber(found[i + 1])
  end
  turns.names, turns.tags, turns.unserved, turns.next_unserved, turns.fetched = names, tags, {}, 1, false
  if #names == 0 then return end
  turns.quotas = dq.quotas_of(names)
  turns.entries = call('HMGET', P .. 'running', unpack(names))
  turns.singles = dq.singles_of(names)
  turns.arrivals = {}
  for i = 1, #names do
    if turns.quotas[i].interval > 0 then
      turns.arrivals = call('ZMSCORE', P .. 'limiter', unpack(names))
      break
    end
  end
end

-- The tenant at a place of the chunk, nil behind its end.
function dq.unserved_at(i)
  local name, quota, single = turns.names[i], turns.quotas[i], turns.singles[i]
  if turns.unserved[i] or not name then return turns.unserved[i] end
  local tenant = {
    name = name, key = P .. 'tenant:' .. name, tag = turns.tags[i], quota = quota, cost = 1 / quota.weight,
    entry = turns.entries[i], slots = slots_of(turns.entries[i]), arrival = tonumber(turns.arrivals[i] or 0),
    single = single,
    -- Its messages as far as they were read: ids and scores alternate; the next one to look at; whether these are
    -- all.
    ids = nil, next_id = 1, ended = false, record = nil,
    served = 0, taken = 0,
  }
  if single then
    local id, score = dq.read_single(single)
    tenant.ids, tenant.ended = {id, score}, true
  end
  turns.unserved[i] = tenant
  return tenant
end

-- Returns the next tenant, or nil behind the last one, and whether it was not served yet.
function dq.next_in_turn(size)
  if turns.next_unserved > #turns.names and not turns.complete then dq.read_turns(size) end
  local unserved = dq.unserved_at(turns.next_unserved)
  if turns.later_tag and not (unserved and unserved.tag < turns.later_tag) then
    local again = {}
    for i = turns.next_again, #turns.again do again[#again + 1] = turns.again[i] end
    for i = 1, #turns.later do
      local tenant, place = turns.later[i], #again + 1
      while place > 1 and dq.is_before(tenant, again[place - 1]) do
        again[place] = again[place - 1]
        place = place - 1
      end
      again[place] = tenant
    end
    turns.again, turns.next_again, turns.later, turns.later_tag = again, 1, {}, nil
  end
  local again = turns.again[turns.next_again]
  if unserved and not (again and dq.is_before(again, unserved)) then return unserved, true end
  return again, false
end

-- Removes the next tenant from those in turn and returns it, or nil.
function dq.take_turn(size)
  local tenant, is_unserved = dq.next_in_turn(size)
  if is_unserved then
    turns.next_unserved = turns.next_unserved + 1
    turns.seen[#turns.seen + 1] = tenant
  elseif tenant then
    turns.next_again = turns.next_again + 1
  end
  return tenant
end

-- Gives another turn to a tenant that was served.
function dq.give_turn_again(tenant)
  turns.later[#turns.later + 1] = tenant
  if not turns.later_tag or tenant.tag < turns.later_tag then turns.later_tag = tenant.tag end
end
