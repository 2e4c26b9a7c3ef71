-- Delivers discards: messages that will not run, for their bookkeeping.
--
-- DERIVES
--   messages HASH
--   discards ZSET
--   reasons HASH
--   deliveries HASH
--@include state
--@include record
--@include dead_letter
--@include delivery
--@include discard
-- Delivers up to `most` discards, in their order. `write_delivered` writes them under the consumer's name before they
-- are removed from `discards`.
local function claim_discards(most, consumer)
  local found = call('ZRANGE', P .. 'discards', 0, most - 1, 'WITHSCORES')
  if #found == 0 then return end
  local ids, lost, unreadable = {}, {}, {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  local records = call('HMGET', P .. 'messages', unpack(ids))
  local reasons = call('HMGET', P .. 'reasons', unpack(ids))
  local crashes = call('HMGET', P .. 'deliveries', unpack(ids))
  for i = 1, #ids do
    local priority, _, _, length = header(records[i])
    if priority then
      deliver(ids[i], tonumber(found[2 * i]), DISCARD, 0, tenant_name(records[i], length), crashes[i],
        reasons[i] or 'cancelled', records[i])
    else
      lost[#lost + 1] = ids[i]
      if records[i] then
        store_dead_letter(ids[i], records[i], 'corrupt', consumer, tonumber(crashes[i] or 0), '')
        unreadable[#unreadable + 1] = ids[i]
      end
    end
  end
  write_delivered(consumer)
  call('ZREM', P .. 'discards', unpack(ids))
  write('HDEL', P .. 'reasons', lost)
  write('HDEL', P .. 'deliveries', lost)
  write('HDEL', P .. 'messages', unreadable)
  tidy_discards(128)
end
