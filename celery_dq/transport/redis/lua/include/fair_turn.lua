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

-- The tenants in line:
--   names, tags, quotas, entries, arrivals, singles: a chunk of `turn`, in order
--   fresh: the tenants of this chunk that were looked at
--   gone: tenants that were served their single message and have left the line
--   again: tenants that were served and are in line again, in order
--   later: the same, not sorted yet: their order matters only when the smallest of their tags is reached
local line = {names = {}, tags = {}, quotas = {}, entries = {}, arrivals = {}, singles = {}, fresh = {}, next_fresh = 1,
  offset = 0, complete = false, fetched = false, seen = {}, gone = {names = {}, tags = {}, slots = {}}, again = {},
  next_again = 1, later = {}, later_tag = nil}
dq.line = line

function dq.read_line(size)
  local found = call('ZRANGE', P .. 'turn', text(line.offset), text(line.offset + size - 1), 'WITHSCORES')
  line.offset = line.offset + size
  line.complete = #found < 2 * size
  local names, tags = {}, {}
  for i = 1, #found, 2 do
    names[#names + 1] = found[i]
    tags[#tags + 1] = tonumber(found[i + 1])
  end
  line.names, line.tags, line.fresh, line.next_fresh, line.fetched = names, tags, {}, 1, false
  if #names == 0 then return end
  line.quotas = dq.quotas_of(names)
  line.entries = call('HMGET', P .. 'running', unpack(names))
  line.singles = dq.singles_of(names)
  line.arrivals = {}
  for i = 1, #names do
    if line.quotas[i].interval > 0 then
      line.arrivals = call('ZMSCORE', P .. 'limiter', unpack(names))
      break
    end
  end
end

-- The tenant at a place of the chunk, nil behind its end.
function dq.fresh_at(i)
  local name, quota, single = line.names[i], line.quotas[i], line.singles[i]
  if line.fresh[i] or not name then return line.fresh[i] end
  local tenant = {
    name = name, key = P .. 'tenant:' .. name, tag = line.tags[i], quota = quota, cost = 1 / quota.weight,
    entry = line.entries[i], slots = slots_of(line.entries[i]), arrival = tonumber(line.arrivals[i] or 0), single = single,
    -- Its messages as far as they were read: ids and scores alternate; the next one to look at; whether these are
    -- all.
    ids = nil, next_id = 1, ended = false, record = nil,
    served = 0, taken = 0,
  }
  if single then
    local id, score = dq.read_single(single)
    tenant.ids, tenant.ended = {id, score}, true
  end
  line.fresh[i] = tenant
  return tenant
end

-- Returns the next tenant, or nil at the end of the line, and whether it was not served yet.
function dq.first_in_line(size)
  if line.next_fresh > #line.names and not line.complete then dq.read_line(size) end
  local fresh = dq.fresh_at(line.next_fresh)
  if line.later_tag and not (fresh and fresh.tag < line.later_tag) then
    local again = {}
    for i = line.next_again, #line.again do again[#again + 1] = line.again[i] end
    for i = 1, #line.later do
      local tenant, place = line.later[i], #again + 1
      while place > 1 and dq.is_before(tenant, again[place - 1]) do
        again[place] = again[place - 1]
        place = place - 1
      end
      again[place] = tenant
    end
    line.again, line.next_again, line.later, line.later_tag = again, 1, {}, nil
  end
  local again = line.again[line.next_again]
  if fresh and not (again and dq.is_before(again, fresh)) then return fresh, true end
  return again, false
end

-- Removes the next tenant from the line and returns it, or nil.
function dq.step_forward(size)
  local tenant, is_fresh = dq.first_in_line(size)
  if is_fresh then
    line.next_fresh = line.next_fresh + 1
    line.seen[#line.seen + 1] = tenant
  elseif tenant then
    line.next_again = line.next_again + 1
  end
  return tenant
end

-- Puts a tenant that was served back in line.
function dq.line_up(tenant)
  line.later[#line.later + 1] = tenant
  if not line.later_tag or tenant.tag < line.later_tag then line.later_tag = tenant.tag end
end
