-- Dedup locks without followers and waiting messages.
--
-- DERIVES
--   dedup_locks HASH
--   dedup_members HASH
--@include state
--@uses record
--@uses tenant_placement
-- Reads the keys of records, and changes a lock whose head has neither followers nor a message behind it. For all
-- other locks these functions call those of `dedup`.
local function make_fast_dedup()
  -- Returns the section of a record that describes its dedup key, or nil when it cannot be read.
  local function section_of(record)
    local size = struct.unpack('>H', record, #record - 1)
    if size < 19 or size + 29 > #record then return nil end
    local start = #record - 1 - size
    local flags, timeout, number, id = struct.unpack('>BddH', record, start)
    if id + 19 > size then return nil end
    return {flags = flags, timeout = timeout, number = number,
      continues = id > 0 and string.sub(record, start + 19, start + 18 + id) or '',
      key = string.sub(record, start + 19 + id, -3)}
  end

  local function scope_of(tenant, key)
    return #tenant .. ':' .. tenant .. key
  end

  -- The end of a packed lock whose head has neither followers nor a message behind it.
  local function alone(id)
    return struct.pack('>BHHH', 0, #id, 0, 0) .. id
  end

  -- Messages of this call that got a lock or wait for one; they are not stored yet.
  local admitted = {}

  -- Returns the verdict on a message {id, tenant, section}: 'accept', 'block', 'follow', 'decline' or 'refuse' (too
  -- many followers); the message that covers it or is ahead of it, nil when the lock was free; and the message that
  -- it replaced, or nil.
  local function admit(message)
    local id, scope = message.id, scope_of(message.tenant, message.section.key)
    if call('HSETNX', P .. 'dedup_locks', scope, struct.pack('>dddBHHHc0', 0, 0, 0, 0, #id, 0, 0, id)) == 0 then
      return dq.dedup().admit(message, scope)
    end
    call('HSET', P .. 'dedup_members', id, scope)
    admitted[id] = message
    state.accepted = state.accepted + 1
    return 'accept'
  end

  -- Notes that these messages {id, record, tenant} were claimed now, under this claim number.
  local function start(messages, number)
    local scopes, timeouts, changed = {}, {}, {}
    for i = 1, #messages do
      local section = section_of(messages[i].record)
      scopes[i], timeouts[i] = scope_of(messages[i].tenant, section.key), section.timeout
    end
    local claims = call('HMGET', P .. 'dedup_locks', unpack(scopes))
    for i = 1, #messages do
      local id = messages[i].id
      local ending = alone(id)
      if claims[i] and string.sub(claims[i], 25) == ending then
        changed[#changed + 1] = scopes[i]
        changed[#changed + 1] = struct.pack('>ddd', now, number, timeouts[i]) .. ending
      elseif claims[i] then
        dq.dedup().start(id, scopes[i], timeouts[i], number)
      end
    end
    write('HSET', P .. 'dedup_locks', changed)
  end

  -- Frees the locks of these messages, which have ended.
  local function leave(ids)
    local scopes = call('HMGET', P .. 'dedup_members', unpack(ids))
    local known = {}
    for i = 1, #ids do known[i] = scopes[i] or '' end
    local claims = call('HMGET', P .. 'dedup_locks', unpack(known))
    local ended, members, others = {}, {}, {}
    for i = 1, #ids do
      if claims[i] and string.sub(claims[i], 25) == alone(ids[i]) then
        ended[#ended + 1] = scopes[i]
        members[#members + 1] = ids[i]
      else
        others[#others + 1] = ids[i]
      end
    end
    write('HDEL', P .. 'dedup_locks', ended)
    write('HDEL', P .. 'dedup_members', members)
    for i = 1, #others do dq.dedup().leave(others[i], true) end
  end

  return {admit = admit, admitted = admitted, leave = leave, scope_of = scope_of, section_of = section_of,
    start = start}
end

local made_keyed
function dq.fast_dedup()
  made_keyed = made_keyed or make_fast_dedup()
  return made_keyed
end
