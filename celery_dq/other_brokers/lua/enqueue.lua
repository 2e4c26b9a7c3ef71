-- Requests the dedup lock for a call: the call begins to run, waits, or is declined.
--
-- KEYS
--   dedup_lock HASH: head, heir and tail of the key, and their followers
--   tokens STRING: the last fencing token
-- DERIVES
--   verdicts:<queue> HASH
--   declined:<task> STRING
-- ARGV
--   channel: prefix of the channels on which owners are woken
--   call: the name of the call
--   owner: the process that renews its lease
--   task: the task of which it is a delivery; '' for none
--   lease_ms: how long its lease holds from now
--   timeout_ms: how long it may run; 0 is without a limit
--   policy: 'decline' or 'replace'
--   waiting: '1', or '0' when no call may wait behind a head that runs
--   follow: '1' when it wants the result of the covering call in case of a decline
-- RETURNS
--   an array: 'accept', 'block' or 'decline'; the call that covers it or is ahead; its token, '0' when it does not run;
--   the call that lost its place, ''; '1' when the covering task has left
-- COST
--   some eleven commands
-- GUARANTEE
--   The same call twice gets the same answer. Another delivery of a waiting task takes the place of the first, and is
--   never declined in favour of it. A call whose lease has ended is ignored. The owner of a follower is woken once the
--   covering task has left, unless the lease of that task ended. Another delivery of a declined task that follows is
--   declined in favour of the same covering task, which began after the declined task was called.
--@include dedup_lock
-- The key that holds the task that covers a declined one.
local function declined(task)
  return string.sub(KEYS[1], 1, string.find(KEYS[1], '}:lock:', 1, true) + 1) .. 'declined:' .. task
end

local function find_task(task)
  for _, place in ipairs({'tail', 'heir', 'head'}) do
    if claim[place] and task_of(claim[place]) == task then return claim[place] end
  end
end

local id, task, policy = ARGV[2], ARGV[4], ARGV[7]
local mine = {token = 0, since = 0, lease = now + tonumber(ARGV[5]) * 1000, timeout = tonumber(ARGV[6]) * 1000,
  id = id, owner = ARGV[3], task = task}
local verdict, covering, replaced, left
local known = find(id)
local record = task ~= '' and ARGV[9] == '1' and declined(task)
local covered_by = record and not known and call('GET', record)
local cover = covered_by and find_task(covered_by)
local head = claim.head
if known then
  verdict = known == 'tail' and 'block' or 'accept'
  covering = known == 'tail' and head.id or id
  claim[known].lease = mine.lease
elseif cover then
  verdict, covering = 'decline', cover.id
elseif covered_by then
  verdict, covering, left = 'decline', covered_by, '1'
elseif not head then
  claim.head = mine
  verdict, covering = 'accept', id
elseif task ~= '' and head.task == task and not claim.heir then
  if head.token > 0 then claim.heir = mine else claim.head = mine end
  verdict, covering = 'accept', id
elseif task ~= '' and claim.heir and claim.heir.task == task then
  verdict, covering, replaced, claim.heir = 'accept', id, claim.heir, mine
elseif task ~= '' and claim.tail and claim.tail.task == task then
  verdict, covering, replaced, claim.tail = 'block', head.id, claim.tail, mine
elseif head.token == 0 and (not (claim.heir or claim.tail) or policy == 'decline') then
  if policy == 'decline' then
    verdict, covering = 'decline', head.id
  else
    verdict, covering, replaced, claim.head = 'accept', id, head, mine
  end
elseif claim.tail then
  if policy == 'decline' then
    verdict, covering = 'decline', claim.tail.id
  else
    verdict, covering, replaced, claim.tail = 'block', head.id, claim.tail, mine
  end
elseif claim.heir and policy == 'decline' then
  verdict, covering = 'decline', claim.heir.id
elseif ARGV[8] == '0' then
  verdict, covering = 'decline', head.id
else
  claim.tail = mine
  verdict, covering = 'block', head.id
end
if not known then count(verdict) end
if replaced then count('replace') end
if verdict == 'decline' and ARGV[9] == '1' and not left then
  local _, ahead = find(covering)
  follow(ahead, ARGV[3])
  -- The record lives for the time in which a broker may deliver the declined call again.
  if record then call('SET', record, task_of(ahead), 'EX', 86400) end
end
local token = begin(id)
save(ARGV[1])
if replaced then call('PUBLISH', ARGV[1] .. replaced.owner, KEYS[1]) end
return {verdict, covering, string.format('%.0f', token), replaced and replaced.id or '', left or ''}
