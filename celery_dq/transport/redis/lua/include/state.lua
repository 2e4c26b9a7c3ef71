-- The state of the partition, of which each field is read once and written once, by `save`. Numbers that `call` sends
-- keep all their digits; `..` and `tostring` round them.
--
-- DERIVES
--   unreadable HASH
--@include clock
-- `PartitionKeys.state` in `keys.py` lists the fields. A field is read when a script first asks for it, or with others by
-- `read_state`: a call that reads all of them takes longer than most commands of a script together.
local TEXTS = {next_look_owner = true, leader = true, waits_alone = true, waits_in_line = true, partitions = true,
  claim_window = true}
local read = {}
local state = {}

local function note(stored, ...)
  local names = {...}
  for i = 1, #names do
    local name = names[i]
    local value = stored[i] or (TEXTS[name] and '' or 0)
    -- The addition makes a number of a string at less cost than tonumber.
    if not TEXTS[name] then value = sum(value) end
    read[name], state[name] = value, value
  end
end

-- Notes the values of fields that were read. Absent texts are '' and absent numbers 0. A field that should be a number and
-- is none, because something else has written it, is set aside and counts as absent. Not so the fencing token: without
-- it a former leader could write.
local function keep_state(stored, ...)
  if pcall(note, stored, ...) then return end
  local names = {...}
  for i = 1, #names do
    local name, value = names[i], stored[i]
    if value and not TEXTS[name] and not pcall(sum, value) then
      if name == 'epoch' then error('DQCORRUPT the field epoch of ' .. KEYS[1] .. ' is not a number: see celery dq doctor') end
      call('HSET', P .. 'unreadable', 'state|' .. name, value)
      call('HDEL', KEYS[1], name)
      stored[i] = false
    end
  end
  note(stored, ...)
end

-- Reads these fields at once.
local function read_state(...)
  keep_state(call('HMGET', KEYS[1], ...), ...)
end

setmetatable(state, {__index = function(_, name)
  read_state(name)
  return state[name]
end})

-- As `digits`, for numbers that occur many times in a call: formatting is slow.
local texts = {[0] = '0', [1] = '1'}
local function text(number)
  local known = texts[number]
  if not known then
    known = digits(number)
    texts[number] = known
  end
  return known
end

-- Writes the fields that have changed: comparing a number costs less than writing it. A number that `call` makes a text of
-- takes longer than one that `digits` does.
local function save()
  local changed = {}
  for name, value in pairs(state) do
    if value ~= read[name] then
      changed[#changed + 1] = name
      changed[#changed + 1] = type(value) == 'number' and digits(value) or value
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
  local over = call('ZCOUNT', key, '-inf', text(bound))
  if over > 0 and limit > 0 then call('ZREMRANGEBYRANK', key, '0', text(math.min(over, limit) - 1)) end
end
