-- The map of the queue that this partition has stored, and the tenants that move here by it.
--
-- DERIVES
--   arriving ZSET
--   arrived SET
--@include state
--@uses quota
-- A tenant in `arriving` may have messages here, which wait as if it were paused, until its former home has none. Then
-- it is in `arrived`, for the rest of the change. `state.opened` is the version of the last map of which no tenant
-- arrives any more.

function dq.map_version(map)
  return tonumber(string.match(map, '#(%d+)$') or 0)
end

function dq.stored_map()
  return state.partitions == '' and '1' or state.partitions
end

-- Lets these tenants, which move by a map of this version, wait for the end of their moves.
function dq.expect(tenants, version)
  if state.opened >= version then return end
  local is_here, new = call('SMISMEMBER', P .. 'arrived', unpack(tenants)), {}
  for i = 1, #tenants do
    if is_here[i] == 0 then
      new[#new + 1] = text(now)
      new[#new + 1] = tenants[i]
    end
  end
  if #new == 0 then return end
  call('ZADD', P .. 'arriving', 'NX', unpack(new))
  dq.has_limits, dq.has_pauses = true, true
end
