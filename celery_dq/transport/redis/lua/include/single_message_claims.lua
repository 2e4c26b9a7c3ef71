-- Serves tenants with a single message and no limit.
--
-- DERIVES
--   messages HASH
--@include state
--@uses record
--@uses fair_turn
--@uses delivery
local line = dq.line
-- Serves the next tenants, up to `most` of them, as long as each has a single message and no limit. Such a tenant
-- does not come into line again, so this needs less work per tenant than `serve_tenant`. Does nothing for fewer than
-- SHORT tenants, or in a chunk of tenants whose records were fetched ahead. Stops before a message that cannot run.
function dq.serve_singles(size, most)
  local SHORT = 2
  if line.next_fresh > #line.names and not line.complete then dq.read_line(size) end
  if line.fetched then return end
  local again, bound, at = line.again[line.next_again], line.later_tag, line.next_fresh
  if again and not (bound and bound < again.tag) then bound = again.tag end
  local ids, scores = {}, {}
  while #ids < most and line.singles[at] and line.names[at] do
    local quota = line.quotas[at]
    if quota.interval > 0 or quota.concurrency > 0 or quota.paused then break end
    if bound and bound <= line.tags[at] then break end
    ids[#ids + 1], scores[#ids + 1] = dq.read_single(line.singles[at])
    at = at + 1
  end
  if #ids == 0 or (#ids < SHORT and #ids < most) then return end
  local records, gone = call('HMGET', P .. 'messages', unpack(ids)), line.gone
  for i = 1, #ids do
    local priority, _, expires = dq.header(records[i])
    if not priority or (expires > 0 and expires <= now) then return end
    at = line.next_fresh
    local place, tag, cost = #gone.names + 1, line.tags[at], 1 / line.quotas[at].weight
    dq.deliver(ids[i], scores[i], 0, cost, line.names[at], nil, '', records[i], true)
    gone.names[place], gone.slots[place] = line.names[at], slots_of(line.entries[at]) + 1
    gone.tags[place] = tag + cost
    if tag > state.v then state.v = tag end
    line.next_fresh = at + 1
  end
end
