-- The state machine of one dedup key, the same as in celery_dq/dedup/machine.py. Here each call also has an owner and a
-- lease: the next script on the key drops a call whose lease has ended. The hash has head, heir, tail and `followed`.
-- `followed` is JSON: task -> how many declined calls wait for its result, and the owners of these calls. The owners
-- get a message when the task has left.
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

-- A retry is another call of the same task.
local function task_of(each)
  return each.task ~= '' and each.task or each.id
end

-- Counts a verdict for the queue, which is the part of the key before the first bar.
local function count(verdict)
  local behind = string.find(KEYS[1], '}:lock:', 1, true) + 7
  local queue = string.match(KEYS[1], '^(.-)%%7C', behind) or ''
  call('HINCRBY', string.sub(KEYS[1], 1, behind - 6) .. 'verdicts:' .. queue, verdict, 1)
end

local claim, followed
local before, follows = {}, false
do
  local found = call('HMGET', KEYS[1], 'head', 'heir', 'tail', 'followed')
  claim = {head = read_call(found[1]), heir = read_call(found[2]), tail = read_call(found[3])}
  followed = found[4] and cjson.decode(found[4]) or {}
  if found[4] then
    for _, each in pairs(claim) do before[#before + 1] = task_of(each) end
  end
end

-- Registers `owner` as the owner of a declined call that waits for the result of `each`.
local function follow(each, owner)
  local task = task_of(each)
  local those = followed[task] or {0}
  followed[task], follows = those, true
  those[1] = those[1] + 1
  for i = 2, #those do
    if those[i] == owner then return end
  end
  those[#those + 1] = owner
end

-- Wakes the owners of the calls that followed a task that has left.
local function notify_followers(channel)
  local stays = {}
  for _, each in pairs(claim) do stays[task_of(each)] = true end
  for i = 1, #before do
    local those = followed[before[i]]
    if those and not stays[before[i]] then
      for j = 2, #those do call('PUBLISH', channel .. those[j], KEYS[1]) end
      followed[before[i]], follows = nil, true
    end
  end
end

local function promote()
  claim.head, claim.heir, claim.tail = claim.heir or claim.tail, nil, claim.heir and claim.tail or nil
end

-- Drops calls whose lease has ended, and evicts a head that has been running too long.
local first = claim.head
for _, place in ipairs({'heir', 'tail'}) do
  if claim[place] and claim[place].lease <= now then claim[place] = nil end
end
while claim.head and (claim.head.lease <= now or
    (claim.head.token > 0 and claim.head.timeout > 0 and now - claim.head.since >= claim.head.timeout)) do
  if claim.head.lease > now then count('evict') end
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

-- Writes the machine back, and wakes the owner of a new head, which may start.
local function save(channel)
  notify_followers(channel)
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
  if follows and next(followed) then
    keep[#keep + 1] = 'followed'
    keep[#keep + 1] = cjson.encode(followed)
  elseif follows then
    gone[#gone + 1] = 'followed'
  end
  call('HSET', KEYS[1], unpack(keep))
  if #gone > 0 then call('HDEL', KEYS[1], unpack(gone)) end
  call('PEXPIREAT', KEYS[1], math.ceil(lease / 1000))
  local head = claim.head
  if head and head.token == 0 and not (first and first.id == head.id) then
    call('PUBLISH', channel .. head.owner, KEYS[1])
  end
end
