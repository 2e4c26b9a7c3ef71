-- The single message of a tenant that has no more.
--
-- DERIVES
--   tenant:<tenant> ZSET
--   single HASH
--   unreadable HASH
--@include state
-- The backlog of a tenant is a sorted set of message ids. The first message of a tenant without backlog is stored as
-- an entry (score, id) of the hash `single` instead: a key per tenant would take more time and memory than a message. A
-- tenant has one of the two, never both.
function dq.pack_single(score, id)
  return struct.pack('>d', score) .. id
end

-- Returns id and score of an entry. The id is '' when the entry is too short to be one of these scripts, and the score
-- 0 when it is not a number.
function dq.read_single(entry)
  if #entry < 9 then return '', 0 end
  local score = struct.unpack('>d', entry)
  return string.sub(entry, 9), score == score and score or 0
end

-- Sets aside what should have named a message of a tenant. `recover` finds the message.
function dq.set_aside_waiting(tenant, value)
  call('HSET', P .. 'unreadable', 'waiting|' .. tenant, value)
  state.dropped = state.dropped + 1
end

-- Returns the entries of these tenants, by position; false for a tenant without one.
function dq.singles_of(tenants)
  if #tenants == 0 or (#tenants > 4 and call('EXISTS', P .. 'single') == 0) then return {} end
  return call('HMGET', P .. 'single', unpack(tenants))
end

-- Turns the entries of these tenants into sorted sets. A function that changes a tenant's backlog calls this first.
function dq.expand_singles(tenants)
  if #tenants == 0 then return end
  local singles, unfolded = dq.singles_of(tenants), {}
  for i = 1, #tenants do
    if singles[i] then
      local id, score = dq.read_single(singles[i])
      if id == '' then
        dq.set_aside_waiting(tenants[i], singles[i])
      else
        call('ZADD', P .. 'tenant:' .. tenants[i], score, id)
      end
      unfolded[#unfolded + 1] = tenants[i]
    end
  end
  write('HDEL', P .. 'single', unfolded)
end
