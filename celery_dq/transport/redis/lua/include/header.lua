-- The head of a record.

-- Returns priority, due, expires, the length of the tenant's name, and the flags: 2 for a dedup key; and of a record that is
-- pushed 4 for a countdown by the clock of the publisher, 8 for a message that was accepted before. Returns nil when the
-- record cannot be read: another program wrote it, or it is the mark of a settled message. The lengths are checked before, so
-- unpack cannot fail.
local function read_header(record)
  local HEADER_BYTES = 27
  if not record or #record < HEADER_BYTES then return nil end
  local version, priority, flags, due, expires, tenant, task, envelope = struct.unpack('>BBBddHHI', record)
  if version ~= 1 or priority > 9 or HEADER_BYTES + tenant + task + envelope > #record then return nil end
  if not (due >= 0 and due < 9e15 and expires >= 0 and expires < 9e15) then return nil end
  return priority, due, expires, tenant, flags
end
