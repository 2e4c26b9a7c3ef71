-- The entry of a tenant in the hash `running`.
--@include partition
-- The entry is the number of the tenant's slots, as a text. A claim that leaves a backlog packs it with counts of claimed
-- messages: slots, time, number of messages claimed since then, and the same of the window before: its start, and its
-- messages until that time. Such an entry stays without slots as long as the tenant has a backlog. It is padded to more
-- than 64 bytes: then Redis looks a field up in a table, and does not search a list of all fields.
local RUNNING, COUNTED = '>ddddd' .. string.rep('x', 25), 65
-- A window ends with the first claim after this time, µs.
local CLAIM_WINDOW = 60000000

-- Returns the number of slots in an entry, which may be absent.
local function slots_of(entry)
  if entry and #entry == COUNTED then return (struct.unpack('>d', entry)) end
  return entry and finite(entry) or 0
end
