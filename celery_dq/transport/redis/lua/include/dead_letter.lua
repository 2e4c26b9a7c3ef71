-- Keeps dead letters.
--
-- DERIVES
--   dead HASH
--   dead_info HASH
--   dead_index ZSET
--@include state
--@uses record
-- Stores a record as a dead letter. The time is formatted here, because the JSON encoder would round it.
function dq.store_dead_letter(id, record, reason, worker, deliveries, tenant)
  local task = dq.header(record) and dq.task_name(record) or ''
  local info = string.format('{"reason":%s,"worker":%s,"at":%.0f,"deliveries":%.0f,"tenant":%s,"task":%s}',
    cjson.encode(reason), cjson.encode(worker), now, deliveries, cjson.encode(tenant), cjson.encode(task))
  state.dead_lettered = state.dead_lettered + 1
  call('HSET', P .. 'dead', id, record)
  call('HSET', P .. 'dead_info', id, info)
  call('ZADD', P .. 'dead_index', now, id)
end
