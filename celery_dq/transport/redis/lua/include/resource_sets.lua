-- Resource sets: a message that any of several tenants, its resources, may take.
--
-- DERIVES
--   tenant:<tenant> ZSET
--   resource_sets ZSET
--   rotation:<tenant> ZSET
--@include state
-- A set is the tenant of its messages. Its name is `any_of(`, the names of its resources with commas between them, `)`.
-- Its messages wait in `tenant:<set>`, never in `single`. A set has no place of its own in turn: it is in
-- `resource_sets` while it has a backlog, and its resources are placed as if its messages were theirs. The `rotation` of
-- a resource holds the backlogs that it serves in turns: the sets with a backlog, and its own. A backlog that was served
-- goes to the end. The field `sets` of the state is the number of sets with a backlog.

-- Returns the resources of a set, or nil for another tenant.
function dq.resources_of(name)
  if string.sub(name, 1, 7) ~= 'any_of(' or string.sub(name, -1) ~= ')' then return nil end
  local resources = {}
  for resource in string.gmatch(string.sub(name, 8, -2), '[^,]+') do resources[#resources + 1] = resource end
  return #resources > 0 and resources or nil
end

-- Returns whether a set with a backlog has this resource.
function dq.has_sets(resource)
  return state.sets > 0 and call('EXISTS', P .. 'rotation:' .. resource) == 1
end

local function enter_rotations(set, resources)
  if call('ZADD', P .. 'resource_sets', 'NX', digits(next_seq()), set) == 0 then return end
  for i = 1, #resources do
    local rotation = P .. 'rotation:' .. resources[i]
    call('ZADD', rotation, 'NX', digits(next_seq()), resources[i])
    call('ZADD', rotation, 'NX', digits(next_seq()), set)
  end
end

-- Counts the sets, and writes their number at once: with a lower one, resources would leave their turn.
function dq.count_sets()
  state.sets = call('ZCARD', P .. 'resource_sets')
  call('HSET', KEYS[1], 'sets', state.sets)
end

-- Removes a set whose backlog is empty. `count_sets` is called afterwards.
function dq.leave_rotations(set, resources)
  if call('ZREM', P .. 'resource_sets', set) == 0 then return end
  for i = 1, #resources do
    local rotation = P .. 'rotation:' .. resources[i]
    call('ZREM', rotation, set)
    if call('ZCARD', rotation) == 1 then call('UNLINK', rotation) end
  end
end

-- Returns the tenants to place, each once: for a set, its resources. A set enters or leaves their rotations, according
-- to its backlog.
function dq.placed_for(tenants)
  local has_set = false
  for i = 1, #tenants do has_set = has_set or dq.resources_of(tenants[i]) ~= nil end
  if not has_set then return tenants end
  local placed, seen = {}, {}
  local function add(tenant)
    if not seen[tenant] then placed[#placed + 1] = tenant end
    seen[tenant] = true
  end
  for i = 1, #tenants do
    local resources = dq.resources_of(tenants[i])
    if not resources then
      add(tenants[i])
    else
      if call('EXISTS', P .. 'tenant:' .. tenants[i]) == 1 then
        enter_rotations(tenants[i], resources)
      else
        dq.leave_rotations(tenants[i], resources)
      end
      for j = 1, #resources do add(resources[j]) end
    end
  end
  dq.count_sets()
  return placed
end
