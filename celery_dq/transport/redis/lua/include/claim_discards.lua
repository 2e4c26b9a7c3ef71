-- Delivers discards: messages that will not run, for their bookkeeping.
--
-- DERIVES
--   messages HASH
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--   leases ZSET
--@include state
--@include held_flags
--@uses record
--@uses dead_letter
--@uses delivery
--@uses discard
--@uses wake
-- Delivers up to `most` discards, in their order. `write_delivered` writes them under the consumer's name before they
-- are removed from `discards`.
function dq.claim_discards(most, consumer)
  local found = call('ZRANGE', P .. 'discards', 0, most - 1, 'WITHSCORES')
  if #found == 0 then return end
  local ids, lost, unreadable = {}, {}, {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local reasons = call('HMGET', P .. 'reasons', unpack(ids))
  local crashes = call('HMGET', P .. 'deliveries', unpack(ids))
  for i = 1, #ids do
    local priority, _, _, length = dq.header(records[i])
    if priority then
      dq.deliver(ids[i], tonumber(found[2 * i]), DISCARD, 0, dq.tenant_name(records[i], length), crashes[i],
        reasons[i] or 'cancelled', records[i])
    else
      lost[#lost + 1] = ids[i]
      if records[i] then
        dq.store_dead_letter(ids[i], records[i], 'corrupt', consumer, finite(crashes[i]) or 0, '')
        unreadable[#unreadable + 1] = ids[i]
      end
    end
  end
  local count = #ids - #lost
  if count > 0 then state.discards_claimed = state.discards_claimed + count end
  dq.write_delivered(consumer)
  call('ZREM', P .. 'discards', unpack(ids))
  write('HDEL', P .. 'reasons', lost)
  write('HDEL', P .. 'deliveries', lost)
  write('HDEL', P .. 'messages', unreadable)
  if #lost > 0 then state.dropped = state.dropped + #lost end
  dq.tidy_discards(128)
end

-- Lets discards rest after a claim that took `count` of them. The consumers share the rest, but Redis needs some, too.
-- Returns whether the consumer may still be recording its discards when the rest ends, so that another one must look.
function dq.rest_discards(rest, count)
  if rest == 0 or count == 0 then return false end
  local shared = math.max(rest / call('ZCARD', P .. 'leases'), (count + 1) * 250)
  state.discards_at = now + math.min(shared, dq.MAX_REST_US)
  return shared < rest
end
