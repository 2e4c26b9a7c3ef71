-- Reaps the messages of lost consumers.
--
-- DERIVES
--   leases ZSET
--   held:<consumer> HASH
--@include state
--@uses release
-- Releases at most `limit` messages of consumers with an expired lease. Returns their number and a report, three
-- strings for each: consumer, message id, and '1' when it was settled (it is dropped), else '0'. A consumer that
-- holds more than `limit` messages is renamed first. So it can come back with no message in flight while further
-- calls reap the others.
function dq.reap(limit, max_deliveries)
  local reaped, report = 0, {}
  local lost = call('ZRANGEBYSCORE', P .. 'leases', '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #lost, 2 do
    local consumer = lost[i]
    local was_leased = tonumber(lost[i + 1]) > 0
    if state.next_look_owner == consumer then state.next_look_owner = '' end
    local count = call('HLEN', P .. 'held:' .. consumer)
    if count > limit - reaped then
      if reaped == limit then break end
      if was_leased then
        local name = consumer .. '~lost~' .. string.format('%.0f', next_seq())
        call('ZADD', P .. 'leases', 0, name)
        call('RENAME', P .. 'held:' .. consumer, P .. 'held:' .. name)
        call('ZREM', P .. 'leases', consumer)
        consumer = name
      end
    else
      call('ZREM', P .. 'leases', consumer)
    end
    if was_leased then state.leases_lost = state.leases_lost + 1 end
    if count > 0 then
      local entries = dq.some_held(consumer, limit - reaped)
      local name = string.gsub(consumer, '~lost~%d+$', '')
      dq.release_messages(consumer, entries, 'crashed', max_deliveries, name)
      for j = 1, #entries do
        report[#report + 1] = name
        report[#report + 1] = entries[j].id
        report[#report + 1] = entries[j].settled and '1' or '0'
      end
      reaped = reaped + #entries
    end
  end
  if reaped > 0 then state.reaped = state.reaped + reaped end
  return reaped, report
end
