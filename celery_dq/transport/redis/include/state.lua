-- The clock, the prefix of the keys, and the state of the partition. One read here, one write in save().
-- Numbers given to call() keep all their digits; only '..' and tostring() would lose them.
local call = redis.call
local P = string.sub(KEYS[1], 1, -6)
local now
do
  local clock = call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
local FIELDS = {seq = 'seq', v = 'v', claim = 'claim', held = 'held', head = 'head', appt = 'appt',
  owner = 'appt_owner', evict = 'evict', leader = 'leader', floor = 'floor', accepted = 'accepted'}
local read, state
do
  local seen = call('HMGET', KEYS[1], 'seq', 'v', 'claim', 'held', 'head', 'appt', 'appt_owner', 'evict',
    'epoch', 'leader', 'floor', 'accepted')
  read = {
    seq = tonumber(seen[1] or 0), v = tonumber(seen[2] or 0), claim = tonumber(seen[3] or 0),
    held = tonumber(seen[4] or 0), head = tonumber(seen[5] or 0), appt = tonumber(seen[6] or 0),
    owner = seen[7] or '', evict = tonumber(seen[8] or 0),
    epoch = tonumber(seen[9] or 0), leader = seen[10] or '', floor = tonumber(seen[11] or 0),
    accepted = tonumber(seen[12] or 0),
  }
  state = {
    seq = read.seq, v = read.v, claim = read.claim, held = read.held, head = read.head, appt = read.appt,
    owner = read.owner, evict = read.evict,
    epoch = read.epoch, leader = read.leader, floor = read.floor, accepted = read.accepted,
  }
end

-- A number with all its digits. Formatting is slow, and most counts and tags come many times in a call.
local texts = {[0] = '0', [1] = '1'}
local function text(number)
  local known = texts[number]
  if not known then
    known = string.format('%.17g', number)
    texts[number] = known
  end
  return known
end

-- Only what has changed: to write a number costs more than to compare it.
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

-- The next sequence time: never twice the same, never going back.
local function next_seq()
  state.seq = math.max(state.seq + 1, now)
  return state.seq
end

-- Removes members whose score is not above `bound`, at most `limit` of them.
local function collect(key, bound, limit)
  local over = call('ZCOUNT', key, '-inf', bound)
  if over > 0 and limit > 0 then call('ZREMRANGEBYRANK', key, 0, math.min(over, limit) - 1) end
end

-- Writes that take lists: nothing happens for an empty one.
local function write(command, key, list)
  if #list > 0 then call(command, key, unpack(list)) end
end
