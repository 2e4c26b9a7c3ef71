-- Ends the run of a call, releases it, or ends its wait.
--
-- KEYS
--   dedup_lock HASH: head, heir and tail of the key, and their followers
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are woken
--   how: 'finish' (the run is over), 'release' (the run did not take place: wait again) or 'withdraw' (end the wait)
--   call: the name of the call
--   token: the token of its run; '0' for withdraw
-- RETURNS
--   1, or 0 when the call had lost the lock, or is unknown: nothing changed
-- COST
--   some five commands
-- GUARANTEE
--   Only a call with the right token ends a run.
--@include dedup_lock
local how, token = ARGV[2], tonumber(ARGV[4])
local place, mine = find(ARGV[3])
local done = place and mine.token == token and (how == 'withdraw') == (token == 0)
if done and how == 'release' then
  mine.token, mine.since = 0, 0
elseif done then
  if place == 'head' then promote() else claim[place] = nil end
end
save(ARGV[1])
return done and 1 or 0
