-- What a call delivers to its consumer: the strings of its reply, the entries of the consumer's in-flight hash, and
-- the dedup keys that begin to run.
--
-- DERIVES
--   held:<consumer> HASH
--@include state
--@include held_flags
--@include waiting_times
--@uses in_flight
-- `number` is the claim number of this call, `count` how many messages it delivers. The reply may begin with strings
-- of the script; `first` is the second string of a message that was never delivered before. `entries` are written by
-- `write_delivered`. `started` are messages {id, record, tenant} with a dedup key that are delivered to run. `alone` and
-- `in_line` are the unpacked waiting times of messages that are delivered to run.
local delivery = {number = state.claim + 1, count = 0, reply = {}, entries = {}, started = {},
  alone = nil, in_line = nil}
delivery.first = digits(delivery.number) .. '||'
dq.delivery = delivery

-- `is_alone`: no other message of the tenant has waited while this one did. `resource`: the resource that takes the
-- message of a set.
function dq.deliver(id, score, flags, charge, tenant, deliveries, reason, record, is_alone, resource)
  delivery.count = delivery.count + 1
  local priority, marks = string.byte(record, 2, 3)
  if reason == '' and is_alone then
    delivery.alone = delivery.alone or unpack_waits(state.waits_alone)
    add_wait(delivery.alone, score, priority)
  elseif reason == '' then
    delivery.in_line = delivery.in_line or unpack_waits(state.waits_in_line)
    add_wait(delivery.in_line, score, priority)
  end
  if marks >= 2 then
    flags = flags + KEYED
    if reason == '' then delivery.started[#delivery.started + 1] = {id = id, record = record, tenant = tenant} end
  end
  local entries, reply = delivery.entries, delivery.reply
  local at = #entries
  entries[at + 1] = id
  entries[at + 2] = dq.pack_held(delivery.number, score, now, flags, charge, resource or tenant)
  local crashes = deliveries and string.format('%.0f', finite(deliveries) or 0) or ''
  at = #reply
  reply[at + 1] = id
  if resource then
    reply[at + 2] = string.format('%.0f|%s||%s', delivery.number, crashes, resource)
  elseif not deliveries and reason == '' then
    reply[at + 2] = delivery.first
  else
    reply[at + 2] = string.format('%.0f|%s|%s', delivery.number, crashes, reason)
  end
  reply[at + 3] = record
end

-- Messages are written under their consumer's name before they are removed from where they waited.
function dq.write_delivered(consumer)
  write('HSET', P .. 'held:' .. consumer, delivery.entries)
  delivery.entries = {}
end

-- Counts the messages that this call delivers to run.
function dq.count_waits()
  if delivery.alone then state.waits_alone = struct.pack(WAITS, unpack(delivery.alone)) end
  if delivery.in_line then state.waits_in_line = struct.pack(WAITS, unpack(delivery.in_line)) end
end
