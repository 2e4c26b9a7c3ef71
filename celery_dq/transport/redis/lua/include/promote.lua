-- Promotes messages and tenants whose time has come.
--
-- DERIVES
--   messages HASH
--   turn ZSET
--   throttled ZSET
--   finish_tags ZSET
--   delayed ZSET
--@include state
--@uses record
--@uses dead_letter
--@uses tenant_placement
--@uses dedup
--@uses pauses
-- Promotes delayed messages that are due, throttled tenants that have a permit and tenants whose pause is over, at most
-- `limit` of each, and evicts dedup locks that were held for too long. A delayed message gets the place of one that was
-- pushed at its due time. `has_delayed` is false when no message is delayed. Returns how many messages, tenants and locks
-- there were.
function dq.promote(limit, has_delayed)
  local evicted = state.evict > 0 and state.evict <= now and dq.dedup().evict_overdue(limit) or 0
  local resumed = state.resume_at > 0 and state.resume_at <= now and dq.end_pauses(limit) or 0
  local due = has_delayed and call('ZRANGEBYSCORE', P .. 'delayed', '-inf', text(now), 'WITHSCORES', 'LIMIT', '0',
    text(limit)) or {}
  if #due > 0 then
    local ids = {}
    for i = 1, #due, 2 do ids[#ids + 1] = due[i] end
    local records = call('HMGET', P .. 'messages', unpack(ids))
    local tenants, waiting, corrupt, dropped = {}, {}, {}, 0
    for i = 1, #ids do
      local priority, _, _, tenant = dq.header(records[i])
      if priority then
        tenant = dq.tenant_name(records[i], tenant)
        local list = waiting[tenant]
        if not list then
          list = {}
          waiting[tenant] = list
          tenants[#tenants + 1] = tenant
        end
        list[#list + 1] = tonumber(due[2 * i]) - priority * state.head
        list[#list + 1] = ids[i]
      else
        dropped = dropped + 1
        if records[i] then
          dq.store_dead_letter(ids[i], records[i], 'corrupt', '', 0, '')
          corrupt[#corrupt + 1] = ids[i]
        end
      end
    end
    dq.add_waiting(tenants, waiting)
    call('ZREM', P .. 'delayed', unpack(ids))
    write('HDEL', P .. 'messages', corrupt)
    if dropped > 0 then state.dropped = state.dropped + dropped end
  end
  local allowed = call('ZRANGEBYSCORE', P .. 'throttled', '-inf', text(now), 'LIMIT', '0', text(limit))
  if #allowed > 0 then
    local tags = call('ZMSCORE', P .. 'finish_tags', unpack(allowed))
    local turn = {}
    for i = 1, #allowed do
      turn[2 * i - 1] = text(math.max(state.v, tonumber(tags[i] or 0)))
      turn[2 * i] = allowed[i]
    end
    call('ZADD', P .. 'turn', unpack(turn))
    call('ZREM', P .. 'throttled', unpack(allowed))
    call('ZREM', P .. 'finish_tags', unpack(allowed))
  end
  return #due / 2 + #allowed + evicted + resumed
end
