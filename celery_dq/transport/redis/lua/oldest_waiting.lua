-- Finds for how long the oldest waiting messages of tenants have waited. Changes nothing.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   tenant:<tenant> ZSET
--   single HASH
--   turn ZSET
--   throttled ZSET
--   at_concurrency ZSET
--   paused ZSET
--   resource_sets ZSET
-- ARGV
--   place: 'turn', 'resource_sets', 'throttled', 'at_concurrency' or 'paused': the tenants that are there; '' takes them by name
--   first: the first rank there
--   most: the number of tenants there, at most 100
--   tenant*: the names of tenants, at most 100
-- RETURNS
--   the µs that the oldest waiting message of each tenant has waited, '-1' without one
-- COST
--   one command per tenant with a backlog and per priority of its messages, at most ten; two more, and with aging
--   priorities one more per message that is looked at: at most some 2000
-- GUARANTEE
--   Reads only. A wait begins when the message was stored or due. With strict priority, or one priority only, the reply is
--   exact. With aging priorities it is that of the first message of some priorities: another message may have waited
--   longer, by at most nine steps of aging. While messages wait that were pushed with another aging, it is wrong by up to
--   nine steps of either aging.
--@include clock
--@include partition
local STRICT, MARGIN = 1e15, 1e12
local head = finite(call('HGET', KEYS[1], 'head')) or 0
-- With strict priority the score tells the priority, because no message waits for longer than a step.
local margin = head >= STRICT and MARGIN or 0
local function priority_and_wait(id, score)
  if head == 0 then return 0, now - score end
  local priority
  if margin > 0 then
    priority = math.min(math.max(math.floor((now + margin - score) / head), 0), 9)
  else
    priority = string.byte(call('HGET', P .. 'messages', id) or '', 2) or 0
  end
  local wait = now - score
  if wait < STRICT / 2 then return priority, wait - priority * head end
  -- The message was pushed with strict priority, whose steps are longer than any wait.
  wait = wait % STRICT
  return priority, wait < STRICT / 2 and wait or 0
end

local place, first = ARGV[1], tonumber(ARGV[2])
local last = first + math.min(tonumber(ARGV[3]), 100) - 1
local names = place == '' and {unpack(ARGV, 4)} or call('ZRANGE', P .. place, first, last)
if #names == 0 then return {} end
local singles, reply = call('HMGET', P .. 'single', unpack(names)), {}
for i = 1, #names do
  local single, longest, priority, wait = singles[i], -1, nil, nil
  if single and #single > 8 then
    priority, wait = priority_and_wait(string.sub(single, 9), (struct.unpack('>d', single)))
    longest = math.max(wait, 0)
  else
    local key = P .. 'tenant:' .. names[i]
    local found, lowest = call('ZRANGE', key, '0', '0', 'WITHSCORES'), 10
    while found[2] do
      priority, wait = priority_and_wait(found[1], tonumber(found[2]))
      longest = math.max(longest, wait, 0)
      -- The next message has a lower priority. If the aging or the clock has changed, one may have the same, and a
      -- backlog must not be walked message by message.
      priority = math.min(priority, lowest - 1)
      lowest = priority
      if priority <= 0 then break end
      local bound = math.max(now + margin - priority * head, tonumber(found[2]))
      found = call('ZRANGEBYSCORE', key, '(' .. digits(bound), '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
    end
  end
  reply[i] = digits(math.floor(longest))
end
return reply
