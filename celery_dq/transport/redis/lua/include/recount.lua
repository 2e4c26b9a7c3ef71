-- Repairs the count of in-flight messages.
--
-- DERIVES
--   leases ZSET
--   held:<consumer> HASH
--@include state
-- Counts the in-flight messages again, because a script that failed halfway has miscounted them. Each is in the hash
-- of a consumer with a lease. With more than SOME consumers, only some of the calls count, so that a call reads SOME
-- hashes on average. With more than MOST consumers no call counts.
local SOME, MOST = 100, 1000

function dq.recount_held()
  local consumers = call('ZCARD', P .. 'leases')
  if consumers > MOST or now % math.max(consumers, 1) >= SOME then return end
  local names, held = call('ZRANGE', P .. 'leases', 0, -1), 0
  for i = 1, #names do held = held + call('HLEN', P .. 'held:' .. names[i]) end
  state.held = held
end
