--@include state
--@include give_back
-- Takes back what consumers with an expired lease hold, at most `limit` messages. Who holds more than that is
-- renamed first, so that he may come back with nothing held while the rest is being taken.
local function reap(limit, max_deliveries)
  local reaped = 0
  local lost = call('ZRANGEBYSCORE', P .. 'leases', '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #lost, 2 do
    local consumer = lost[i]
    if state.owner == consumer then state.owner = '' end
    local count = call('HLEN', P .. 'held:' .. consumer)
    if count > limit - reaped then
      if reaped == limit then break end
      if tonumber(lost[i + 1]) > 0 then
        local name = consumer .. '~lost~' .. string.format('%.0f', next_seq())
        call('ZADD', P .. 'leases', 0, name)
        call('RENAME', P .. 'held:' .. consumer, P .. 'held:' .. name)
        call('ZREM', P .. 'leases', consumer)
        consumer = name
      end
    else
      call('ZREM', P .. 'leases', consumer)
    end
    if count > 0 then
      local entries = some_held(consumer, limit - reaped)
      give_back(consumer, entries, 'crashed', max_deliveries, (string.gsub(consumer, '~lost~%d+$', '')))
      reaped = reaped + #entries
    end
  end
  return reaped
end
