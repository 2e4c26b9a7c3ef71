--@include state
--@include record
-- Keeps a record as a dead letter. JSON is put together by hand: the encoder would round the time.
local function bury(id, record, reason, worker, deliveries, tenant)
  local task = header(record) and task_name(record) or ''
  local info = string.format('{"reason":%s,"worker":%s,"at":%.0f,"deliveries":%.0f,"tenant":%s,"task":%s}',
    cjson.encode(reason), cjson.encode(worker), now, deliveries, cjson.encode(tenant), cjson.encode(task))
  call('HSET', P .. 'dead', id, record)
  call('HSET', P .. 'dead_info', id, info)
  call('ZADD', P .. 'dead_index', now, id)
end
