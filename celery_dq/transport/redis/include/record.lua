-- Reads the header of a record; nil when it is not one of ours (somebody else wrote it, or only the mark of a
-- settled message is left). The lengths are checked before, so unpack cannot fail.
local HEADER_BYTES = 27

-- Returns priority, due, expires, and the length of the tenant's name.
local function header(record)
  if not record or #record < HEADER_BYTES then return nil end
  local version, priority, _, due, expires, tenant, task, envelope = struct.unpack('>BBBddHHI', record)
  if version ~= 1 or priority > 9 or HEADER_BYTES + tenant + task + envelope > #record then return nil end
  if not (due >= 0 and due < 9e15 and expires >= 0 and expires < 9e15) then return nil end
  return priority, due, expires, tenant
end

local function tenant_name(record, length)
  return string.sub(record, HEADER_BYTES + 1, HEADER_BYTES + length)
end

local function task_name(record)
  local tenant, task = struct.unpack('>HH', record, 20)
  return string.sub(record, 28 + tenant, 27 + tenant + task)
end

-- What is left in `messages` of a settled one: a zero byte and its consumer. It keeps the id taken.
local function is_mark(record)
  return string.byte(record, 1) == 0
end
