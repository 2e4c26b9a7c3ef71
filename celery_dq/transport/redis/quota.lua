-- Sets or deletes a quota. A tenant's own one acts on its backlog at once.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   turn ZSET
--   throttled ZSET
--   limited ZSET
--   parked ZSET
--   finish ZSET
--   limiter ZSET
--   running HASH
--   quotas HASH
--   delayed ZSET
--   discards ZSET
--   leases ZSET
--   wake LIST
--   tenant:<tenant> ZSET
--   sole HASH
-- ARGV
--   field: 't:<tenant>', 'default' (set live) or 'config' (from the settings)
--   packed: the quota, or '' to delete it
-- RETURNS
--   1
-- COST
--   some 20 commands
-- GUARANTEE
--   A tenant's next token is never further away than its new burst allows. `default` and `config` act on tenants that
--   are placed from then on; `place` brings them to those with backlog.
--@include state
--@include recap
--@include wake
local field, packed = ARGV[1], ARGV[2]
local tenant = string.match(field, '^t:(.*)$')
if not (tenant or field == 'default' or field == 'config') then
  return redis.error_reply('DQINVALID quota: the field must be default, config or t:<tenant>')
end
if packed == '' then
  call('HDEL', P .. 'quotas', field)
elseif read_quota(packed, field) then
  call('HSET', P .. 'quotas', field, packed)
else
  return redis.error_reply('DQINVALID quota: the packed quota cannot be read')
end
if tenant then
  recap({tenant})
  wake()
  save()
end
return 1
