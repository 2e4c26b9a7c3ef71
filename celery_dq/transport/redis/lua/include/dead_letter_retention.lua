-- Deletes dead letters that are kept no longer.
--
-- DERIVES
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--@include state
-- Deletes the oldest dead letters, at most `limit` of them: those older than `age` µs, and those beyond the `most` latest
-- ones. An age or a number of 0 means no bound.
function dq.delete_old_dead_letters(limit, age, most)
  local ids = {}
  if age > 0 then ids = call('ZRANGEBYSCORE', P .. 'dead_index', '-inf', text(now - age), 'LIMIT', 0, limit) end
  if most > 0 and #ids < limit then
    -- Both lists begin with the oldest one, so the longer list contains the other.
    local beyond = math.min(call('ZCARD', P .. 'dead_index') - most, limit)
    if beyond > #ids then ids = call('ZRANGE', P .. 'dead_index', 0, beyond - 1) end
  end
  if #ids == 0 then return end
  call('HDEL', P .. 'dead', unpack(ids))
  call('HDEL', P .. 'dead_info', unpack(ids))
  call('ZREM', P .. 'dead_index', unpack(ids))
end
