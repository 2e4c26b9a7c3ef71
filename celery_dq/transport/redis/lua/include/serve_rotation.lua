-- Serves a resource: its own messages and those of the sets that it belongs to take turns.
--
-- DERIVES
--   tenant:<tenant> ZSET
--   rotation:<tenant> ZSET
--@include state
--@uses resource_sets
--@uses serve_tenant
-- The most backlogs of a resource in one claim. Those that were served go to the end, so the next claim reads others.
local MOST = 64
-- The sets that this claim has looked at, by name. They have the fields of a tenant that `serve_backlog` reads.
dq.sets_looked_at = {}

local function rotation_of(tenant)
  local names, rotation = call('ZRANGE', P .. 'rotation:' .. tenant.name, '0', MOST - 1), {}
  for i = 1, #names do
    local name, set = names[i], dq.sets_looked_at[names[i]]
    if name == tenant.name then
      set = tenant
    elseif not set then
      set = {name = name, key = P .. 'tenant:' .. name, resources = dq.resources_of(name), ids = nil, next_id = 1,
        ended = false, taken = 0}
      dq.sets_looked_at[name] = set
    end
    rotation[i] = set
  end
  if #names > 0 then tenant.rotated = {} else rotation[1] = tenant end
  return rotation
end

-- Returns whether a message is left for a resource in turn. In this claim, other resources may have emptied its sets.
function dq.has_message_left(serving, tenant)
  tenant.rotation = tenant.rotation or rotation_of(tenant)
  for i = 1, #tenant.rotation do
    if dq.read_ids(serving, tenant.rotation[i], 1) > 0 then return true end
  end
  return false
end

-- Looks at the next `run` messages of a resource, in the order of its rotation, and takes those that may be taken. A
-- tenant that is in no set has its own messages only.
function dq.serve_rotation(serving, tenant, run)
  tenant.rotation = tenant.rotation or rotation_of(tenant)
  local rotation = tenant.rotation
  while run > 0 and #rotation > 0 do
    local backlog, served = rotation[1], tenant.served
    local goes_on, looked_at = dq.serve_backlog(serving, tenant, backlog, #rotation == 1 and run or 1)
    local is_served, is_passed = tenant.served > served, tenant.passed
    if is_served and tenant.rotated then tenant.rotated[#tenant.rotated + 1] = backlog.name end
    if is_served or is_passed or looked_at == 0 then table.remove(rotation, 1) end
    -- The claim passes over a backlog, not over the resource: its other backlogs do not wait for this one.
    if is_passed then
      tenant.passed = nil
    elseif is_served then
      rotation[#rotation + 1] = backlog
    end
    if not (goes_on or is_passed) then return end
    run = run - looked_at
  end
end
