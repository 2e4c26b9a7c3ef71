-- The clock, the prefix of the keys, and the state of the partition, which is read once here and written once by
-- `save`. Numbers that `call` sends keep all their digits; `..` and `tostring` round them.
local call = redis.call
local P = string.sub(KEYS[1], 1, -6)
local now
do
  local clock = call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
local FIELDS = {seq = 'seq', v = 'v', claim = 'claim', held = 'held', head = 'head', next_look = 'next_look',
  next_look_owner = 'next_look_owner', evict = 'evict', leader = 'leader', floor = 'floor', accepted = 'accepted'}
local read, state
do
  local seen = call('HMGET', KEYS[1], 'seq', 'v', 'claim', 'held', 'head', 'next_look', 'next_look_owner', 'evict',
    'epoch', 'leader', 'floor', 'accepted')
  read = {
    seq = tonumber(seen[1] or 0), v = tonumber(seen[2] or 0), claim = tonumber(seen[3] or 0),
    held = tonumber(seen[4] or 0), head = tonumber(seen[5] or 0), next_look = tonumber(seen[6] or 0),
    next_look_owner = seen[7] or '', evict = tonumber(seen[8] or 0),
    epoch = tonumber(seen[9] or 0), leader = seen[10] or '', floor = tonumber(seen[11] or 0),
    accepted = tonumber(seen[12] or 0),
  }
  state = {
    seq = read.seq, v = read.v, claim = read.claim, held = read.held, head = read.head, next_look = read.next_look,
    next_look_owner = read.next_look_owner, evict = read.evict,
    epoch = read.epoch, leader = read.leader, floor = read.floor, accepted = read.accepted,
  }
end

-- Returns a number with all its digits. Formatting is slow, and most counts and tags occur many times in a call.
local texts = {[0] = '0', [1] = '1'}
local function text(number)
  local known = texts[number]
  if not known then
    known = string.format('%.17g', number)
    texts[number] = known
  end
  return known
end

-- Writes the fields that have changed: comparing a number costs less than writing it.
local function save()
  local changed = {}
  for name, field in pairs(FIELDS) do
    if state[name] ~= read[name] then
      changed[#changed + 1] = field
      changed[#changed + 1] = state[name]
    end
  end
  if #changed > 0 then call('HSET', KEYS[1], unpack(changed)) end
end

-- Returns the next sequence time, which is higher than all before it.
local function next_seq()
  state.seq = math.max(state.seq + 1, now)
  return state.seq
end

-- Removes members whose score is not above `bound`, at most `limit` of them.
local function collect(key, bound, limit)
  local over = call('ZCOUNT', key, '-inf', bound)
  if over > 0 and limit > 0 then call('ZREMRANGEBYRANK', key, 0, math.min(over, limit) - 1) end
end

-- Sends a command that takes a list, unless the list is empty.
local function write(command, key, list)
  if #list > 0 then call(command, key, unpack(list)) end
end
