-- Takes the next messages of one tenant, or of a set of which it is a resource.
--
-- DERIVES
--   messages HASH
--   deliveries HASH
--@include state
--@uses single_message
--@uses record
--@uses dead_letter
--@uses fair_turn
--@uses delivery
-- The most messages that cannot run in one claim: removing one costs as much as claiming one.
local MAX_SKIPS = 32
local delivery = dq.delivery
-- These functions share a table `serving` of the script that claims:
--   consumer, want: the script's arguments; so are max_deliveries and suspects
--   free: how many more messages of tenants with a concurrency limit the claim may take
--   crashes_known: whether any message of the partition has a delivery that counts
--   chunk: how many tenants are read at once
--   passes: how many tenants were passed over, because their next message is not for this claim
--   skips: how many messages were found that cannot run
--   leaves_skips: whether it leaves such messages to the next claim
--   is_full: whether the claim takes no more
--   has_suspect: whether its only message has crashed a worker before
--   discarded: messages {id, tenant, reason} that will not run
--   unreadable: ids of messages whose records cannot be read

-- The messages of a dead consumer come first again, so the claim looks behind as many tenants as it has passed over.
-- Returns false.
local function pass_over_tenant(serving, tenant)
  tenant.passed, serving.passes = true, math.min(serving.passes + 1, 1000)
  serving.chunk = math.max(serving.chunk, math.min(serving.passes, 128))
  return false
end

-- Removes the backlog's next message, which cannot run: it becomes a discard, unless its record is lost.
local function discard_next_message(serving, backlog, id, record, deliveries, is_readable, is_expired)
  serving.skips = serving.skips + 1
  if not is_readable and record then
    dq.store_dead_letter(id, record, 'corrupt', serving.consumer, deliveries, backlog.name)
    serving.unreadable[#serving.unreadable + 1] = id
  elseif is_expired then
    serving.discarded[#serving.discarded + 1] = {id = id, tenant = backlog.name, reason = 'expired'}
  elseif is_readable then
    dq.store_dead_letter(id, record, 'max_deliveries', '', deliveries, backlog.name)
    serving.discarded[#serving.discarded + 1] = {id = id, tenant = backlog.name, reason = 'dead:max_deliveries'}
  else
    -- What names the message may be what cannot be read, and its record may still be there.
    dq.set_aside_waiting(backlog.name, backlog.single or id)
  end
end

-- Takes or discards the backlog's next message. Returns whether to go on with the one behind it.
local function take_next_message(serving, tenant, backlog, id, score, record, crashes)
  local deliveries = crashes and finite(crashes) or 0
  local priority, _, expires = dq.header(record)
  local is_expired = priority and expires > 0 and expires <= now
  local is_dead = deliveries > 0 and serving.max_deliveries > 0 and deliveries >= serving.max_deliveries
  if not priority or is_expired or is_dead then
    if serving.skips >= MAX_SKIPS then
      serving.leaves_skips = true
      return pass_over_tenant(serving, tenant)
    end
    discard_next_message(serving, backlog, id, record, deliveries, priority, is_expired)
  else
    if deliveries > 0 then
      -- A consumer that has a suspect takes no second one, and a suspect is taken alone: it may crash its worker.
      if not serving.suspects then return pass_over_tenant(serving, tenant) end
      serving.is_full = true
      if delivery.count > 0 then return false end
      serving.has_suspect = true
    end
    dq.deliver(id, score, 0, tenant.cost, backlog.name, crashes, '', record, backlog.single,
      backlog ~= tenant and tenant.name or nil)
    local quota, tag = tenant.quota, tenant.tag
    if tag > state.v then state.v = tag end
    tenant.tag = tag + tenant.cost
    tenant.served = tenant.served + 1
    tenant.slots = tenant.slots + 1
    if quota.interval > 0 then tenant.arrival = dq.take_permit(tenant.arrival, quota) end
    if quota.concurrency > 0 then serving.free = serving.free - 1 end
  end
  backlog.taken = backlog.taken + 1
  backlog.next_id = backlog.next_id + 1
  return deliveries == 0 or not serving.is_full
end

-- Reads more ids of the backlog when fewer than `run` are known. Returns how many are known and not taken.
function dq.read_ids(serving, backlog, run)
  local ids = backlog.ids or {}
  backlog.ids = ids
  local left = #ids / 2 - backlog.next_id + 1
  if left <= run and not backlog.ended then
    -- One more id than needed shows whether there is a backlog; a backlog that was served often reads ahead.
    local size = math.max(run - left, math.min(backlog.taken, serving.want - delivery.count)) + 1
    local start = #ids / 2
    local more = call('ZRANGE', backlog.key, text(start), text(start + size - 1), 'WITHSCORES')
    for i = 1, #more do ids[2 * start + i] = more[i] end
    backlog.ended = #more < 2 * size
    left = left + #more / 2
  end
  return left
end

-- Looks at the next `run` messages of a backlog and takes those that may be taken. `backlog` is the tenant itself, or a set
-- of which the tenant is a resource. Returns whether more of them may be taken, and how many there were.
function dq.serve_backlog(serving, tenant, backlog, run)
  run = math.min(run, dq.read_ids(serving, backlog, run))
  if run == 0 then return true, 0 end
  local first, ids = backlog.next_id, backlog.ids
  local wanted, records, crashes = {}, nil, {}
  for i = 1, run do wanted[i] = ids[2 * (first + i) - 3] end
  if run == 1 and first == 1 and backlog.record ~= nil then
    records = {backlog.record}
  else
    records = call('HMGET', P .. 'messages', unpack(wanted))
  end
  if serving.crashes_known then crashes = call('HMGET', P .. 'deliveries', unpack(wanted)) end
  for i = 1, run do
    local score = tonumber(ids[2 * (first + i - 1)])
    if not take_next_message(serving, tenant, backlog, wanted[i], score, records[i], crashes[i]) then return false, run end
  end
  return true, run
end
