-- The machine of one key, as celery_dq/dedup/machine.py has it. Here every call has an owner and a lease as well:
-- what nobody renews is dropped when the key is next looked at.
local call = redis.call
local now
do
  local clock = call('TIME')
  now = clock[1] * 1000000 + clock[2]
end

-- token, since (µs), lease (µs when it ends), timeout (µs, 0 is never), id, owner, task
local function read_call(packed)
  if not packed then return nil end
  local token, since, lease, timeout, id, owner = struct.unpack('>ddddHH', packed)
  return {token = token, since = since, lease = lease, timeout = timeout, id = string.sub(packed, 37, 36 + id),
    owner = string.sub(packed, 37 + id, 36 + id + owner), task = string.sub(packed, 37 + id + owner)}
end

local function pack_call(each)
  return struct.pack('>ddddHHc0c0', each.token, each.since, each.lease, each.timeout, #each.id, #each.owner, each.id,
    each.owner) .. each.task
end

local claim
do
  local found = call('HMGET', KEYS[1], 'head', 'heir', 'tail')
  claim = {head = read_call(found[1]), heir = read_call(found[2]), tail = read_call(found[3])}
end

local function promote()
  claim.head, claim.heir, claim.tail = claim.heir or claim.tail, nil, claim.heir and claim.tail or nil
end

-- Drops who is not renewed, and evicts a head that has been running too long.
local first = claim.head
for _, place in ipairs({'heir', 'tail'}) do
  if claim[place] and claim[place].lease <= now then claim[place] = nil end
end
while claim.head and (claim.head.lease <= now or
    (claim.head.token > 0 and claim.head.timeout > 0 and now - claim.head.since >= claim.head.timeout)) do
  promote()
end

local function find(id)
  for _, place in ipairs({'head', 'heir', 'tail'}) do
    if claim[place] and claim[place].id == id then return place, claim[place] end
  end
end

local function begin(id)
  if not claim.head or claim.head.id ~= id then return 0 end
  if claim.head.token == 0 then
    claim.head.token, claim.head.since = call('INCR', KEYS[2]), now
  end
  return claim.head.token
end

-- Writes the machine back, and tells a new head's owner that it may start.
local function save(channel)
  local keep, gone, lease = {}, {}, 0
  for _, place in ipairs({'head', 'heir', 'tail'}) do
    local each = claim[place]
    if each then
      keep[#keep + 1] = place
      keep[#keep + 1] = pack_call(each)
      lease = math.max(lease, each.lease)
    else
      gone[#gone + 1] = place
    end
  end
  if #keep == 0 then
    call('DEL', KEYS[1])
    return
  end
  call('HSET', KEYS[1], unpack(keep))
  if #gone > 0 then call('HDEL', KEYS[1], unpack(gone)) end
  call('PEXPIREAT', KEYS[1], math.ceil(lease / 1000))
  local head = claim.head
  if head and head.token == 0 and not (first and first.id == head.id) then
    call('PUBLISH', channel .. head.owner, KEYS[1])
  end
end
