-- Claims messages under a lease, in fair order. It also settles and finishes messages, renews the lease as the
-- heartbeat does, promotes messages that are due, and plans the next look.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   delayed ZSET
--   discards ZSET
--   finish_tags ZSET
--   limiter ZSET
--   deliveries HASH
--   leases ZSET
--   dedup_members HASH
-- ARGV
--   consumer: the consumer that claims
--   lease_ms: how long the lease holds from now
--   want: how many messages it has free slots for, at most 1000; 0 only settles, finishes and renews
--   free: how many of them may belong to tenants with a concurrency limit; when one more has its turn, the claim ends
--   hold: '1' it may plan the next look even with messages, '0' only without or with discards only, '-' never
--   max_deliveries: deliveries after which a message that crashes is dead; 0 is never
--   suspects: '1' may take one message that has crashed a worker before, '0' passes over tenants whose next is one
--   discards: how many discards to take besides, at most 1000; none when want is 0
--   rest_us: how long this consumer takes no discards after it has taken some here; 0 means no rest
--   n_settle: number of tags to settle, at most 1000
--   (claim, id)*: the tags
--   n_finish: number of tags to finish, at most 1000
--   (claim, id)*: the tags
-- RETURNS
--   an array: '1' when a message may be served now, else '0'; µs until the look that this consumer has planned, or
--   '-1'; number of stale tags; '1' when the only message has crashed a worker before, '2' when the consumer is fenced
--   out, '4' when the claim has ended at a tenant that needs a free slot, '3' when a tenant may have a limit, else '0';
--   '-1' when the consumer had its lease until now, else (no lease, or fenced out) the number of the last claim before
--   this one: its messages of claims up to that are lost; then three strings per message: message id,
--   'claim number|deliveries|reason', record. For a message of a set the reason is '|' and the resource that takes it.
--   Deliveries is '' for a message that was never delivered before, '0' for
--   one that came back without a crash. The reason is '', except for a discard: a message that is delivered for its
--   bookkeeping only and took neither permit nor slot. Discards come last.
-- COST
--   15 commands for one plain message and 16 for more, see `claim_plain`; eight more where tenants have limits. Else some
--   24, and per tenant that is served one to read, one to fetch and one to remove; promotes and tidies at most 128 of each
--   kind; removes at most 32 messages that cannot run, and passes over at most 1000 tenants whose next message is a suspect
--   or a 33rd of those, at three commands each; some ten for discards; one more with aging priorities, to count waiting times
-- GUARANTEE
--   The result is the same as that of claims of one message each. A message is written under the consumer's name
--   before it is removed from its tenant. Rates and concurrency are never exceeded. Discards take the place of no
--   message, and the tenants take turns in them, too. A message that is found expired, or has crashed too often,
--   becomes a discard and costs its tenant no turn. After a claim that took discards, no claim takes any for rest_us
--   divided by the number of consumers. At the end of this rest one consumer looks, and 2 ms after a claim that took no
--   message and left some that cannot run. Messages are served as if there were no discards. In a pause of the queue the
--   claim takes discards only.
--@include partition
--@include settle
--@include finish
--@include plain_claim
local consumer, want = ARGV[1], math.min(tonumber(ARGV[3]), 1000)
--@include out_of_memory_guard
local known = call('HMGET', KEYS[1], 'epoch', 'claim', 'held', 'v', 'floor', 'evict', 'next_look_owner',
  'paused_until', 'sets', 'waits_alone', 'settled')
local epoch = tonumber(known[1] or 0)
-- A message that ends needs no mark that it was settled.
local settles, stale_settled, behind = are_finished_too(10), 0, 11 + 2 * ARGV[10]
if not settles then stale_settled, behind = settle_tags(consumer, 10, epoch) end
local has_limits, has_rare = look_for_rare_keys()
local stale_finished, _, finished, tenants, members, settled = finish_tags(consumer, behind, epoch, has_rare,
  settles)
local stale = stale_settled + stale_finished
if not has_rare and want > 0 and (finished == 0 or #members == 0) then
  local free = has_limits and tonumber(ARGV[4]) or nil
  local reply = claim_plain(consumer, tonumber(ARGV[2]), want, known, finished, settled, stale, free)
  if reply then return reply end
end
--@include state
-- Before the includes, because the delivery begins with the claim number.
keep_state(known, 'epoch', 'claim', 'held', 'v', 'floor', 'evict', 'next_look_owner', 'paused_until', 'sets',
  'waits_alone', 'settled')
read_state('resume_at', 'claim_window')
--@include lease
--@uses in_flight
--@uses leader_lease
--@uses promote
--@uses delivery
--@uses single_message_claims
--@uses run_length
--@uses fetch_ahead
--@uses serve_tenant
--@uses serve_rotation
--@uses place_served
--@uses claim_discards
--@uses claim_window
--@uses next_look
local PROMOTE, TENANTS_PER_MESSAGE, REMOVAL_PAUSE_US = 128, 16, 2000
local turns, delivery = dq.turns, dq.delivery
local most_discards = want > 0 and math.min(tonumber(ARGV[8]), 1000) or 0

if finished > 0 then dq.end_finish(finished, tenants, members, settled) end
if not has_rare then dq.has_limits, dq.has_pauses = has_limits, false end
-- The end of a message with a dedup key may have made one.
has_rare = (has_rare or #members > 0) and call('EXISTS', P .. 'delayed', P .. 'discards', P .. 'deliveries') > 0
  or state.evict > 0
if has_rare or dq.has_limits then dq.promote(PROMOTE, has_rare) end

local alive, last_claim = call('ZSCORE', P .. 'leases', consumer), digits(state.claim)
local reply = delivery.reply
reply[1], reply[2], reply[3], reply[4] = '0', '-1', text(stale), '0'
reply[5] = alive and '-1' or last_claim
if is_fenced_out(consumer, state.epoch) or (state.epoch > 0 and dq.has_lost_leadership()) then
  -- This consumer may have taken a wake-up that the leader needs.
  dq.wake()
  save()
  reply[4], reply[5] = '2', last_claim
  return reply
end
if state.epoch > 0 then state.leader = consumer end

-- In a pause of the queue no message is served. The short path of a claim is taken again once the field is 0.
if state.paused_until <= now then state.paused_until = 0 end
local is_paused = state.paused_until > 0
local serving = {consumer = consumer, want = want, free = tonumber(ARGV[4]), max_deliveries = tonumber(ARGV[6]),
  suspects = ARGV[7] == '1', crashes_known = has_rare and want > 0 and call('EXISTS', P .. 'deliveries') == 1,
  chunk = math.max(want, 1), passes = 0, skips = 0, leaves_skips = false, is_full = false, has_suspect = false, needs_slot = false,
  discarded = {}, unreadable = {}}
local most_seen = TENANTS_PER_MESSAGE * serving.chunk
while not is_paused and delivery.count < want and not serving.is_full and #turns.seen < most_seen + serving.passes do
  if not serving.crashes_known and state.sets == 0 then dq.serve_singles(serving.chunk, want - delivery.count) end
  local tenant = delivery.count < want and dq.take_turn(serving.chunk)
  if not tenant then break end
  if not turns.fetched and state.sets == 0 and tenant == turns.unserved[turns.next_unserved - 1]
    and turns.next_unserved <= #turns.names then
    dq.fetch_ahead(tenant, want - delivery.count)
  end
  local quota = tenant.quota
  local has_turn = dq.place_of(quota, tenant.slots, tenant.arrival) == 'turn'
  if has_turn and quota.concurrency > 0 and serving.free <= 0 then
    has_turn = false
    if state.sets == 0 or dq.has_message_left(serving, tenant) then
      -- If others were claimed ahead of their slots now, they would take each slot that becomes free.
      serving.needs_slot = true
      break
    end
  end
  if has_turn then
    local follower = dq.next_in_turn(serving.chunk)
    local run, has_more = dq.run_length(tenant, follower, want - delivery.count, serving.free), nil
    if state.sets == 0 then
      dq.serve_backlog(serving, tenant, tenant, run)
      has_more = not tenant.ended or tenant.next_id <= #tenant.ids / 2
    else
      dq.serve_rotation(serving, tenant, run)
      has_more = #tenant.rotation > 0
    end
    if not tenant.passed and has_more then dq.give_turn_again(tenant) end
  end
end

-- The lease is written first, because messages of a consumer without a lease are never reaped. Then the messages are
-- written under the consumer's name, and at last they are removed from where they waited.
renew_lease(consumer, alive, tonumber(ARGV[2]))
dq.write_delivered(consumer)
if #serving.discarded > 0 then
  dq.add_discards(serving.discarded)
  has_rare = true
end
local leaves_backlog, is_over = dq.place_served(has_rare)
write('HDEL', P .. 'messages', serving.unreadable)
if #serving.unreadable > 0 then state.dropped = state.dropped + #serving.unreadable end
write('HDEL', P .. 'deliveries', serving.unreadable)
if #delivery.started > 0 then dq.fast_dedup().start(delivery.started, delivery.number) end
if #serving.discarded > 0 and call('EXISTS', P .. 'dedup_members') == 1 then
  for i = 1, #serving.discarded do dq.dedup().leave(serving.discarded[i].id, false) end
end
-- A message that may crash its worker is delivered alone.
local message_count = delivery.count
if has_rare and most_discards > 0 and not serving.has_suspect and dq.discards_rest() == 0 then
  dq.claim_discards(most_discards, consumer)
end
local is_late = dq.rest_discards(tonumber(ARGV[9]), delivery.count - message_count)
if delivery.count > 0 then
  state.claim = delivery.number
  state.held = state.held + delivery.count
  dq.count_waits()
end
local is_busy = dq.close_busy_period(is_over)
local window = state.claim_window
local window_age = leaves_backlog and (#window == 48 and now - struct.unpack('>d', window) or math.huge) or 0
if window_age < 0 then window_age = math.huge end -- the clock has jumped back
if window_age >= CLAIM_WINDOW then dq.end_claim_window(window_age) end
-- Behind messages that cannot run, the next claim removes more. Until then Redis has time for others.
local pause = message_count == 0 and serving.leaves_skips and REMOVAL_PAUSE_US or nil
if dq.has_limits then
  if is_busy then collect(P .. 'finish_tags', state.v, PROMOTE) end
  collect(P .. 'limiter', now, PROMOTE)
end

local may_keep = not is_late and (ARGV[5] == '1' or (ARGV[5] == '0' and message_count == 0))
local may_serve = is_busy and not is_paused and not pause
local is_more, look_in = dq.plan_next_look(consumer, may_keep, may_serve, has_rare, pause)
if is_more then reply[1] = '1' end
if look_in then reply[2] = string.format('%.0f', look_in) end
reply[4] = serving.has_suspect and '1' or serving.needs_slot and '4' or dq.has_limits and '3' or '0'
save()
return reply
