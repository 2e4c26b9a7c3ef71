-- Serves tenants with a single message and no limit.
--
-- DERIVES
--   messages HASH
--@include state
--@uses record
--@uses fair_turn
--@uses delivery
local turns = dq.turns
-- Serves the next tenants, up to `most` of them, as long as each has a single message and no limit. Such a tenant
-- does not get another turn, so this needs less work per tenant than `serve_tenant`. Does nothing for fewer than
-- SHORT tenants, or in a chunk of tenants whose records were fetched ahead. Stops before a message that cannot run.
function dq.serve_singles(size, most)
  local SHORT = 2
  if turns.next_unserved > #turns.names and not turns.complete then dq.read_turns(size) end
  if turns.fetched then return end
  local again, bound, at = turns.again[turns.next_again], turns.later_tag, turns.next_unserved
  if again and not (bound and bound < again.tag) then bound = again.tag end
  local ids, scores = {}, {}
  while #ids < most and turns.singles[at] and turns.names[at] do
    local quota = turns.quotas[at]
    if quota.interval > 0 or quota.concurrency > 0 or quota.paused then break end
    if bound and bound <= turns.tags[at] then break end
    ids[#ids + 1], scores[#ids + 1] = dq.read_single(turns.singles[at])
    at = at + 1
  end
  if #ids == 0 or (#ids < SHORT and #ids < most) then return end
  local records, gone = call('HMGET', P .. 'messages', unpack(ids)), turns.gone
  for i = 1, #ids do
    local priority, _, expires = dq.header(records[i])
    if not priority or (expires > 0 and expires <= now) then return end
    at = turns.next_unserved
    local place, tag, cost = #gone.names + 1, turns.tags[at], 1 / turns.quotas[at].weight
    dq.deliver(ids[i], scores[i], 0, cost, turns.names[at], nil, '', records[i], true)
    gone.names[place], gone.slots[place] = turns.names[at], slots_of(turns.entries[at]) + 1
    gone.tags[place] = tag + cost
    if tag > state.v then state.v = tag end
    turns.next_unserved = at + 1
  end
end
