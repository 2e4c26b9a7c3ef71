-- A call ends its run, gives it back, or stops waiting.
--
-- KEYS
--   claim HASH: head, heir and tail of the key, and who follows them
-- DERIVES
--   verdicts:<queue> HASH
-- ARGV
--   channel: prefix of the channels on which owners are told
--   how: 'finish' (the run is over), 'release' (it did not take place: wait again) or 'withdraw' (wait no more)
--   call: who
--   token: that of its run; '0' for withdraw
-- RETURNS
--   1, or 0 when the key had been taken from it, or it is not known: nothing changed
-- COST
--   some five commands
-- GUARANTEE
--   Only who holds the right token ends a run.
--@include claim
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
