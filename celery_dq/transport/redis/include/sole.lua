--@include state
-- What waits for a tenant is a sorted set of message ids. But one message for a tenant who had none is its sole
-- message, an entry in the hash `sole` (score, id), and no set is made: for many tenants with little, a key for
-- each takes more time and memory than their messages. A tenant has one of the two, never both.
local function pack_sole(score, id)
  return struct.pack('>d', score) .. id
end

-- Returns id and score; an id that there is not when somebody else wrote the entry.
local function read_sole(entry)
  if #entry < 9 then return '', 0 end
  return string.sub(entry, 9), (struct.unpack('>d', entry))
end

-- The sole messages of these tenants, by position; false for one who has none.
local function soles_of(tenants)
  if #tenants == 0 or call('EXISTS', P .. 'sole') == 0 then return {} end
  return call('HMGET', P .. 'sole', unpack(tenants))
end

-- Makes sorted sets of these tenants' sole messages. Whatever changes what waits for a tenant calls this first.
local function unfold(tenants)
  local soles, unfolded = soles_of(tenants), {}
  for i = 1, #tenants do
    if soles[i] then
      local id, score = read_sole(soles[i])
      call('ZADD', P .. 'tenant:' .. tenants[i], score, id)
      unfolded[#unfolded + 1] = tenants[i]
    end
  end
  write('HDEL', P .. 'sole', unfolded)
end
