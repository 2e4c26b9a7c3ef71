-- Takes messages under a lease, in fair order. On the way it settles and finishes, renews the lease as renew does,
-- promotes what is due, and hands the next appointment to whoever may keep it.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--   lenient:<consumer> STRING
--   wake LIST
--   leader HASH
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--   tenant:<tenant> ZSET
--   sole HASH
--   held:<consumer> HASH
--   claims HASH
--   claimants HASH
--   blocked ZSET
--   following HASH
--   followers:<message> LIST
--   evictions ZSET
--   verdicts HASH
--   evicted CHANNEL
-- ARGV
--   consumer: who claims
--   lease_ms: how long the lease holds from now
--   want: how many messages there is room for, at most 1000; 0 only settles, finishes and renews
--   free: how many of them may belong to tenants with a concurrency limit
--   hold: '1' may keep an appointment even with messages, '0' only without, '-' not at all
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
--   suspects: '1' may take one message that has crashed a worker before, '0' passes over tenants whose next is one
--   n_settle: number of tags to settle, at most 1000
--   (claim, id)*: the tags
--   n_finish: number of tags to finish, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   an array: '1' when something may be served right now, else '0'; µs until the appointment that this consumer keeps,
--   or '-1'; number of stale tags; '1' when the only message has crashed a worker before, '2' when the consumer is
--   fenced out, else '0'; '1' when the consumer had its lease until now, '0' when it had none or had lost it with all
--   that it held; then three strings per message: message id, 'claim number|deliveries|reason', record. Deliveries is
--   '' for a message that was never delivered before, '0' for one that came back without a crash. The reason is '' but
--   for a discard, which is delivered for its bookkeeping only and took neither token nor slot.
-- COST
--   some 20 commands, and per tenant that is served one to read, one to fetch and one to remove; promotes and tidies
--   at most 128 of each kind, passes over at most 64 removed messages and 1000 suspects, these at three each
-- GUARANTEE
--   The result is what claims of one message each would have given. What is taken is written under the
--   consumer's name before it is removed from its tenant. Rates and concurrency are never exceeded.
--@include state
--@include full
--@include lease
--@include record
--@include bury
--@include held
--@include office
--@include promote
--@include fair
--@include shallow
--@include wake
local PROMOTE, SKIPS, ROUNDS, PASSES = 128, 64, 16, 1000

local consumer, want, free = ARGV[1], math.min(tonumber(ARGV[3]), 1000), tonumber(ARGV[4])
local max_deliveries, suspects = tonumber(ARGV[6]), ARGV[7] == '1'

local settling, stale_settles, behind = read_tags(consumer, 8)
settle(consumer, settling)
local finishing, stale_finishes = read_tags(consumer, behind)
finish(consumer, finishing)
local stale = stale_settles + stale_finishes
promote(PROMOTE)

local claim = state.claim + 1
local plain = string.format('%.0f||', claim)
local alive = call('ZSCORE', P .. 'leases', consumer)
local reply = {'0', '-1', tostring(stale), '0', alive and '1' or '0'}
if is_fenced_out(consumer) or is_out_of_office() then
  -- The token that woke this one up was the leader's.
  wake()
  save()
  reply[4] = '2'
  return reply
end
if state.epoch > 0 then state.leader = consumer end
local got, held, reasons, unreadable, started, leaving = 0, {}, {}, {}, {}, {}

local function deliver(id, score, flags, charge, tenant, deliveries, reason, record)
  got = got + 1
  if is_keyed(record) then
    flags = flags + KEYED
    local list = reason == '' and started or leaving
    list[#list + 1] = {id = id, record = record, tenant = tenant}
  end
  local at = #held
  held[at + 1] = id
  held[at + 2] = pack_held(claim, score, now, flags, charge, tenant)
  at = #reply
  reply[at + 1] = id
  if not deliveries and reason == '' then
    reply[at + 2] = plain
  else
    reply[at + 2] = string.format('%.0f|%s|%s', claim, deliveries or '', reason)
  end
  reply[at + 3] = record
end

-- Discards go first: they take neither token nor slot.
if want > 0 then
  local found = call('ZRANGE', P .. 'discards', 0, want - 1, 'WITHSCORES')
  if #found > 0 then
    local ids = {}
    for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
    local records = call('HMGET', P .. 'messages', unpack(ids))
    local why = call('HMGET', P .. 'reasons', unpack(ids))
    local crashes = call('HMGET', P .. 'deliveries', unpack(ids))
    local lost = {}
    for i = 1, #ids do
      local priority, _, _, length = header(records[i])
      if priority then
        deliver(ids[i], tonumber(found[2 * i]), DISCARD, 0, tenant_name(records[i], length),
          crashes[i], why[i] or 'cancelled', records[i])
      else
        lost[#lost + 1] = ids[i]
        if records[i] then
          bury(ids[i], records[i], 'corrupt', consumer, tonumber(crashes[i] or 0), '')
          unreadable[#unreadable + 1] = ids[i]
        end
      end
    end
    write('HSET', P .. 'held:' .. consumer, held)
    held = {}
    call('ZREM', P .. 'discards', unpack(ids))
    write('HDEL', P .. 'reasons', lost)
    write('HDEL', P .. 'deliveries', lost)
  end
end

local crashed_before = want > got and call('EXISTS', P .. 'deliveries') == 1
local chunk = math.max(want - got, 1)
local reach, passes, skips, suspect, stop = ROUNDS * chunk, 0, 0, false, false

-- How many messages this tenant may be given before it is another one's turn.
local function run_length(tenant, follower)
  local quota, most = tenant.quota, want - got
  local capped, rated = quota.concurrency > 0, quota.interval > 0
  if follower and follower.tag < tenant.tag + tenant.cost then return 1 end
  if not follower and not capped and not rated then return most end
  local after = {tag = tenant.tag, name = tenant.name}
  local arrival, run = tenant.arrival, 0
  if capped then most = math.min(most, free, quota.concurrency - tenant.slots) end
  while run < most do
    run = run + 1
    after.tag = after.tag + tenant.cost
    if rated then
      arrival = take_token(arrival, quota)
      if token_due(arrival, quota) > now then break end
    end
    if follower and not is_before(after, follower) then break end
  end
  return run
end

-- When several tenants will be served once each, their first records are fetched together.
local function fetch_ahead(head)
  local tenants, ids = {}, {}
  local first = line.next_fresh - 1
  line.fetched = true
  for i = first, math.min(#line.names, first + want - got - 1) do
    local tenant = fresh_at(i)
    if tenant.tag > head.tag + head.cost then break end
    if place_of(tenant.quota, tenant.slots, tenant.arrival) == 'turn' then
      if not tenant.sole then
        tenant.ids = call('ZRANGE', tenant.key, '0', '1', 'WITHSCORES')
        tenant.ended = #tenant.ids < 4
      end
      if tenant.ids[1] then
        tenants[#tenants + 1] = tenant
        ids[#ids + 1] = tenant.ids[1]
      end
    end
  end
  if #ids == 0 then return end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  for i = 1, #tenants do tenants[i].record = records[i] end
end

-- Takes the tenant's next message, if it may be taken.
local function take(tenant, id, score, record, crashes)
  local deliveries = tonumber(crashes or 0)
  local priority, _, expires = header(record)
  if not priority then
    skips = skips + 1
    if skips >= SKIPS then stop = true end
    if record then
      bury(id, record, 'corrupt', consumer, deliveries, tenant.name)
      unreadable[#unreadable + 1] = id
    end
  elseif expires > 0 and expires <= now then
    reasons[#reasons + 1] = id
    reasons[#reasons + 1] = 'expired'
    deliver(id, score, DISCARD, 0, tenant.name, crashes, 'expired', record)
  elseif max_deliveries > 0 and deliveries >= max_deliveries then
    bury(id, record, 'max_deliveries', '', deliveries, tenant.name)
    reasons[#reasons + 1] = id
    reasons[#reasons + 1] = 'dead:max_deliveries'
    deliver(id, score, DISCARD, 0, tenant.name, crashes, 'dead:max_deliveries', record)
  else
    if deliveries > 0 and not suspects then
      -- Two that may take their worker with them do not go to the same one. All that a dead one held is next, so
      -- others are looked for behind as many.
      tenant.passed, passes = true, math.min(passes + 1, PASSES)
      chunk = math.max(chunk, math.min(passes, PROMOTE))
      return
    end
    if deliveries > 0 then
      -- It may take its worker with it, so it goes alone.
      stop = true
      if got > 0 then return end
      suspect = true
    end
    deliver(id, score, 0, tenant.cost, tenant.name, crashes, '', record)
    local quota = tenant.quota
    if tenant.tag > state.v then state.v = tenant.tag end
    tenant.tag = tenant.tag + tenant.cost
    tenant.served = tenant.served + 1
    tenant.slots = tenant.slots + 1
    if quota.interval > 0 then tenant.arrival = take_token(tenant.arrival, quota) end
    if quota.concurrency > 0 then free = free - 1 end
  end
  tenant.taken = tenant.taken + 1
  tenant.next_id = tenant.next_id + 1
end

-- Looks at the tenant's next `run` messages and takes those that may be taken.
local function serve(tenant, run)
  local ids = tenant.ids or {}
  tenant.ids = ids
  local left = #ids / 2 - tenant.next_id + 1
  if left <= run and not tenant.ended then
    -- One more than needed tells whether there is backlog; a tenant that is seen often reads ahead.
    local size = math.max(run - left, math.min(tenant.taken, want - got)) + 1
    local start = #ids / 2
    local more = call('ZRANGE', tenant.key, text(start), text(start + size - 1), 'WITHSCORES')
    for i = 1, #more do ids[2 * start + i] = more[i] end
    tenant.ended = #more < 2 * size
    left = left + #more / 2
  end
  run = math.min(run, left)
  if run == 0 then return end
  local first = tenant.next_id
  local wanted, records, crashes = {}, nil, {}
  for i = 1, run do wanted[i] = ids[2 * (first + i) - 3] end
  if run == 1 and first == 1 and tenant.record ~= nil then
    records = {tenant.record}
  else
    records = call('HMGET', P .. 'messages', unpack(wanted))
  end
  if crashed_before then crashes = call('HMGET', P .. 'deliveries', unpack(wanted)) end
  for i = 1, run do
    take(tenant, wanted[i], tonumber(ids[2 * (first + i - 1)]), records[i], crashes[i])
    if stop or tenant.passed then return end
  end
end

local function has_more(tenant)
  local ids = tenant.ids
  if ids and tenant.next_id <= #ids / 2 then return true end
  return not tenant.ended and call('ZCARD', tenant.key) > tenant.taken
end

while got < want and not stop and #line.seen < reach + passes do
  if not crashed_before then serve_soles(chunk, want - got, deliver) end
  local tenant = got < want and step_forward(chunk)
  if not tenant then break end
  if not line.fetched and tenant == line.fresh[line.next_fresh - 1] and line.next_fresh <= #line.names then
    fetch_ahead(tenant)
  end
  local quota = tenant.quota
  if place_of(quota, tenant.slots, tenant.arrival) == 'turn' and (quota.concurrency == 0 or free > 0) then
    serve(tenant, run_length(tenant, (first_in_line(chunk))))
    if not tenant.passed and (not tenant.ended or tenant.next_id <= #tenant.ids / 2) then line_up(tenant) end
  end
end

-- What was taken is written first, then removed from where it waited.
if got > 0 then
  state.claim = claim
  state.held = state.held + got
end
write('HSET', P .. 'held:' .. consumer, held)
write('HSET', P .. 'reasons', reasons)

local slots, arrivals, leave, emptied, soles = {}, {}, {}, {}, {}
local into = {turn = {}, throttled = {}, limited = {}, parked = {}, finish = {}}
for i = 1, #line.seen do
  local tenant = line.seen[i]
  local name = tenant.name
  if tenant.served > 0 then
    slots[#slots + 1] = name
    slots[#slots + 1] = text(tenant.slots)
    if tenant.quota.interval > 0 then
      arrivals[#arrivals + 1] = text(tenant.arrival)
      arrivals[#arrivals + 1] = name
    end
  end
  local place, score
  if has_more(tenant) then
    place, score = place_of(tenant.quota, tenant.slots, tenant.arrival)
  else
    local list = tenant.sole and soles or emptied
    list[#list + 1] = tenant.sole and name or tenant.key
    tenant.taken = 0
  end
  if place == 'turn' then
    score = tenant.tag
  else
    leave[#leave + 1] = name
    if not place and is_unlimited(tenant.quota) then
      state.floor = math.max(state.floor, tenant.tag)
    elseif tenant.tag > state.v then
      into.finish[#into.finish + 1] = text(tenant.tag)
      into.finish[#into.finish + 1] = name
    end
  end
  if place and (place ~= 'turn' or tenant.served > 0) then
    local list = into[place]
    list[#list + 1] = text(score)
    list[#list + 1] = name
  end
end
for i = 1, #line.gone.names do
  local name, tag = line.gone.names[i], line.gone.tags[i]
  slots[#slots + 1] = name
  slots[#slots + 1] = text(line.gone.slots[i])
  soles[#soles + 1] = name
  leave[#leave + 1] = name
  if tag > state.floor then state.floor = tag end
end
write('HSET', P .. 'running', slots)
write('ZADD', P .. 'limiter', arrivals)
for place, entries in pairs(into) do write('ZADD', P .. place, entries) end
if #leave == #line.seen + #line.gone.names and #leave > 0 then
  -- Nobody stays of those who were first.
  call('ZREMRANGEBYRANK', P .. 'turn', '0', text(#leave - 1))
else
  write('ZREM', P .. 'turn', leave)
end
for i = 1, #line.seen do
  local tenant = line.seen[i]
  if tenant.taken > 0 then call('ZREMRANGEBYRANK', tenant.key, '0', text(tenant.taken - 1)) end
end
if #emptied > 0 then call('UNLINK', unpack(emptied)) end
write('HDEL', P .. 'sole', soles)
write('HDEL', P .. 'messages', unreadable)
write('HDEL', P .. 'deliveries', unreadable)
if #started > 0 then keyed().start(started, claim) end
for i = 1, #leaving do dedup().leave(leaving[i].id, false) end
close_busy_period()
collect(P .. 'finish', text(state.v), PROMOTE)
collect(P .. 'limiter', now, PROMOTE)
renew_lease(consumer, alive, tonumber(ARGV[2]))

-- The end of a claim is that of the other scripts, but that it may keep the next appointment itself.
local may_hold = ARGV[5] == '1' or (ARGV[5] == '0' and got == 0)
local eligible = call('EXISTS', P .. 'turn', P .. 'discards') > 0
local due = not eligible and next_due()
if due and due <= now then eligible = true end
if state.owner == consumer and (eligible or not due or not may_hold) then state.owner = '' end
if eligible then
  reply[1] = '1'
  if call('EXISTS', P .. 'wake') == 0 then call('RPUSH', P .. 'wake', '1') end
elseif not due then
  state.owner = ''
  call('DEL', P .. 'wake')
elseif state.owner == consumer or not is_kept(due) then
  if may_hold then
    state.owner, state.appt = consumer, due
    reply[2] = string.format('%.0f', due - now)
    call('DEL', P .. 'wake')
  else
    state.owner = ''
    if call('EXISTS', P .. 'wake') == 0 then call('RPUSH', P .. 'wake', '1') end
  end
end
if suspect then reply[4] = '1' end
save()
return reply
