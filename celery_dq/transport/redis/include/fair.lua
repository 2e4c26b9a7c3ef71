--@include state
--@include place
-- The order in which tenants are served: start-time fair queueing. The one with the smallest start tag is next,
-- among equals the one whose name is smaller byte by byte, exactly as in the sorted set `turn`. The set is only
-- read here, so that a claim writes what it took before it changes what waits.

-- Lua's '<' on strings follows the server's locale, a sorted set does not.
local function bytes_before(a, b)
  local shorter = math.min(#a, #b)
  for i = 1, shorter do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function is_before(a, b)
  if a.tag ~= b.tag then return a.tag < b.tag end
  return bytes_before(a.name, b.name)
end

-- Tenants of `turn` in order, read in chunks, and those that were served and are in line again.
local line = {read = {}, next_read = 1, offset = 0, complete = false, again = {}, next_again = 1, seen = {}}

local function read_line(size)
  if line.next_read <= #line.read or line.complete then return end
  local found = call('ZRANGE', P .. 'turn', line.offset, line.offset + size - 1, 'WITHSCORES')
  line.offset = line.offset + size
  line.complete = #found < 2 * size
  line.read, line.next_read = {}, 1
  if #found == 0 then return end
  local names = {}
  for i = 1, #found, 2 do names[#names + 1] = found[i] end
  local quotas = quotas_of(names)
  local slots = call('HMGET', P .. 'running', unpack(names))
  local arrivals
  for i = 1, #names do
    local quota = quotas[i]
    if quota.interval > 0 and not arrivals then arrivals = call('ZMSCORE', P .. 'limiter', unpack(names)) end
    line.read[i] = {
      name = names[i], tag = tonumber(found[2 * i]), quota = quota, cost = 1 / quota.weight,
      slots = tonumber(slots[i] or 0), arrival = tonumber(arrivals and arrivals[i] or 0),
      served = 0, taken = 0, skipped = 0, ids = {}, next_id = 1, ended = false,
    }
  end
end

-- Takes the next tenant out of the line; nil when there is none.
local function step_forward(size)
  read_line(size)
  local fresh, again = line.read[line.next_read], line.again[line.next_again]
  if fresh and not (again and is_before(again, fresh)) then
    line.next_read = line.next_read + 1
    line.seen[#line.seen + 1] = fresh
    return fresh
  end
  if again then line.next_again = line.next_again + 1 end
  return again
end

-- Whoever would be next, to see how long the current one stays ahead.
local function who_follows(size)
  read_line(size)
  local fresh, again = line.read[line.next_read], line.again[line.next_again]
  if fresh and not (again and is_before(again, fresh)) then return fresh end
  return again
end

-- Puts a tenant that was served back in line.
local function line_up(tenant)
  local again = line.again
  local place = #again + 1
  while place > line.next_again and is_before(tenant, again[place - 1]) do
    again[place] = again[place - 1]
    place = place - 1
  end
  again[place] = tenant
end
