-- A call wants a key: it begins to run, waits, or is declined.
--
-- KEYS
--   claim HASH: head, heir and tail of the key, and who follows them
--   tokens STRING: the last fencing token
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are told
--   call: who
--   owner: who renews it
--   task: which task it is a delivery of; '' for none
--   lease_ms: how long its lease holds from now
--   timeout_ms: how long it may run; 0 is without end
--   policy: 'decline' or 'replace'
--   waiting: '1', or '0' when nobody is to wait behind a head that runs
--   follow: '1' when it wants the result of the one that covers it, should it be declined
-- RETURNS
--   an array: 'accept', 'block' or 'decline'; who covers it or is ahead; its token, '0' when it does not run; who
--   gave up its place, ''
-- COST
--   some nine commands
-- GUARANTEE
--   The same call twice is told the same; another delivery of a task that waits takes the place of the first, and is
--   never declined in favour of it. A lease that has run out counts for nothing. The owner of a call that
--   follows is told once the covering task has left, unless nobody renews that one.
--@include claim
local id, task, policy = ARGV[2], ARGV[4], ARGV[7]
local mine = {token = 0, since = 0, lease = now + tonumber(ARGV[5]) * 1000, timeout = tonumber(ARGV[6]) * 1000,
  id = id, owner = ARGV[3], task = task}
local verdict, covering, replaced
local known = find(id)
local head = claim.head
if known then
  verdict = known == 'tail' and 'block' or 'accept'
  covering = known == 'tail' and head.id or id
  claim[known].lease = mine.lease
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
if verdict == 'decline' and ARGV[9] == '1' then
  local _, ahead = find(covering)
  follow(ahead, ARGV[3])
end
local token = begin(id)
save(ARGV[1])
if replaced then call('PUBLISH', ARGV[1] .. replaced.owner, KEYS[1]) end
return {verdict, covering, string.format('%.0f', token), replaced and replaced.id or ''}
