--@include state
--@include record
--@include place
-- What every record with a key takes: to read its key, and the moves of a claim whose head has neither followers nor
-- anybody behind it. For all others these call include/dedup.lua, which is made when the first one comes.
local KEYED = 8

local function is_keyed(record)
  return string.byte(record, 3) >= 2
end

-- All of it is made when it is first needed: most calls need nothing, and to make a function takes time. What the
-- life of a key takes that nobody else asks for is made apart from the rest.
local dedup

local function make_keyed()
  -- What a keyed record says of its key; nil when it cannot be read.
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

  -- The end of a packed claim whose head has neither followers nor anybody behind it.
  local function alone(id)
    return struct.pack('>BHHH', 0, #id, 0, 0) .. id
  end

  -- Messages of this call that got a claim; they are not stored yet.
  local admitted = {}

  -- The verdict on a message {id, tenant, section}: 'accept', 'block', 'follow', 'decline' or 'refuse' (too many
  -- followers); who covers it or is ahead of it, nil when nobody else had the key; and who gave up its place.
  local function admit(message)
    local id, scope = message.id, scope_of(message.tenant, message.section.key)
    if call('HSETNX', P .. 'claims', scope, struct.pack('>dddBHHHc0', 0, 0, 0, 0, #id, 0, 0, id)) == 0 then
      return dedup().admit(message, scope)
    end
    call('HSET', P .. 'claimants', id, scope)
    admitted[id] = message
    state.accepted = state.accepted + 1
    return 'accept'
  end

  -- These messages {id, record, tenant} were claimed just now, under this number.
  local function start(messages, number)
    local scopes, timeouts, changed = {}, {}, {}
    for i = 1, #messages do
      local section = section_of(messages[i].record)
      scopes[i], timeouts[i] = scope_of(messages[i].tenant, section.key), section.timeout
    end
    local claims = call('HMGET', P .. 'claims', unpack(scopes))
    for i = 1, #messages do
      local id = messages[i].id
      local ending = alone(id)
      if claims[i] and string.sub(claims[i], 25) == ending then
        changed[#changed + 1] = scopes[i]
        changed[#changed + 1] = struct.pack('>ddd', now, number, timeouts[i]) .. ending
      elseif claims[i] then
        dedup().start(id, scopes[i], timeouts[i], number)
      end
    end
    write('HSET', P .. 'claims', changed)
  end

  -- These messages with a key are done with.
  local function leave(ids)
    local scopes = call('HMGET', P .. 'claimants', unpack(ids))
    local known = {}
    for i = 1, #ids do known[i] = scopes[i] or '' end
    local claims = call('HMGET', P .. 'claims', unpack(known))
    local ended, claimants, others = {}, {}, {}
    for i = 1, #ids do
      if claims[i] and string.sub(claims[i], 25) == alone(ids[i]) then
        ended[#ended + 1] = scopes[i]
        claimants[#claimants + 1] = ids[i]
      else
        others[#others + 1] = ids[i]
      end
    end
    write('HDEL', P .. 'claims', ended)
    write('HDEL', P .. 'claimants', claimants)
    for i = 1, #others do dedup().leave(others[i], true) end
  end

  return {admit = admit, admitted = admitted, leave = leave, scope_of = scope_of, section_of = section_of,
    start = start}
end

local made_keyed
local function keyed()
  made_keyed = made_keyed or make_keyed()
  return made_keyed
end
