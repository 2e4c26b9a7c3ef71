-- The records of messages.
--@include header

-- The latest time that a record may hold, in µs.
dq.LATEST = 9e15 - 1

dq.header = read_header

-- Returns the record with these values in its header.
function dq.with_header(record, priority, flags, due)
  return string.sub(record, 1, 1) .. struct.pack('>BBd', priority, flags, due) .. string.sub(record, 12)
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
