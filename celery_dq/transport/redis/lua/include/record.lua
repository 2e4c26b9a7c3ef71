-- The records of messages.
--@include header

-- The latest time that a record may hold, in µs.
dq.LATEST = 9e15 - 1

dq.header = read_header

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
