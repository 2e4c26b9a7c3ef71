-- The records of messages.

-- The latest time that a record may hold, in µs.
dq.LATEST = 9e15 - 1

-- Returns priority, due, expires, and the length of the tenant's name; nil when the record cannot be read (another
-- program wrote it, or it is the mark of a settled message). The lengths are checked before, so unpack cannot fail.
function dq.header(record)
  local HEADER_BYTES = 27
  if not record or #record < HEADER_BYTES then return nil end
  local version, priority, _, due, expires, tenant, task, envelope = struct.unpack('>BBBddHHI', record)
  if version ~= 1 or priority > 9 or HEADER_BYTES + tenant + task + envelope > #record then return nil end
  if not (due >= 0 and due < 9e15 and expires >= 0 and expires < 9e15) then return nil end
  return priority, due, expires, tenant
end

-- Returns whether the due time is a countdown by the clock of the publisher.
function dq.is_counted(record)
  return math.floor(string.byte(record, 3) / 4) % 2 == 1
end

-- Returns the record of a countdown with a due time by the clock of the server.
function dq.with_due(record, due)
  local flags = string.byte(record, 3) - 4
  return string.sub(record, 1, 2) .. struct.pack('>Bd', flags, due) .. string.sub(record, 12)
end

function dq.tenant_name(record, length)
  return string.sub(record, 28, 27 + length)
end

function dq.task_name(record)
  local tenant, task = struct.unpack('>HH', record, 20)
  return string.sub(record, 28 + tenant, 27 + tenant + task)
end

-- Returns whether a record has a dedup key.
function dq.is_keyed(record)
  return string.byte(record, 3) >= 2
end

-- Returns whether a record is the mark of a settled message: a zero byte and the consumer. It keeps the id taken.
function dq.is_settled_mark(record)
  return string.byte(record, 1) == 0
end
