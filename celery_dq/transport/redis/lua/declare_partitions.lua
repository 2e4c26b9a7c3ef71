-- Stores how many partitions the queue has, unless that is decided. Partition 0 decides, and the others follow it.
--
-- KEYS
--   state HASH: clock and counters of the partition
-- DERIVES
--   messages HASH
--   quotas HASH
--   pauses ZSET
--   tombstones ZSET
--   dead HASH
--   limiter ZSET
--   running HASH
--   dedup_locks HASH
--   leases ZSET
--   wake LIST
--   imported HASH
--   arrived SET
-- ARGV
--   map: the number of partitions that the client wants or, for a partition that follows, the map that partition 0 has:
--     '7', '7#3' (version 3) or, while tenants move from 4 to 7 partitions, '7<4#2'
--   mode: 'declare' stores it only where none is stored, the partition is bare and no consumer has a living lease;
--     'restore', of a client that has seen this map in the broker, does so despite consumers; 'follow' unless the stored
--     one has a higher version
--   spreads: the spreads of tenants that belong to the map, as JSON; '' for none
--   life_ms: how long the keys of a partition live that the map does not have any more; 0 when the map has it
-- RETURNS
--   an array of three: the map that is stored now, '1' without one; '1' when this call has stored it, else '0'; the
--   spreads that are stored now
-- COST
--   2 to 16 commands
-- GUARANTEE
--   A queue keeps its number of partitions when it stores anything that has a place by its tenant, or when a consumer
--   would miss the new partitions. Of two clients that want different numbers, both get the one that was stored first.
--@include partition
--@include clock
local wanted, mode = ARGV[1], ARGV[2]
if not string.match(wanted, '^[1-9]%d*') then
  return redis.error_reply('DQINVALID declare_partitions: the map must begin with a number from 1')
end
local stored, held, epoch, paused_until, seq, spreads =
  unpack(call('HMGET', KEYS[1], 'partitions', 'held', 'epoch', 'paused_until', 'seq', 'spreads'))
local function version(map) return tonumber(string.match(map, '#(%d+)$') or 0) end
-- A thing that has a place by its tenant would stay here when the tenant gets another home. A quota of the settings comes again.
local function is_bare()
  return tonumber(held or 0) == 0 and tonumber(epoch or 0) == 0 and (tonumber(paused_until or 0) or 0) <= now
    and call('HLEN', P .. 'quotas') == call('HEXISTS', P .. 'quotas', 'config')
    and call('EXISTS', P .. 'messages', P .. 'pauses', P .. 'dead', P .. 'running', P .. 'dedup_locks') == 0
    and call('ZCOUNT', P .. 'tombstones', digits(now), '+inf') == 0
    and call('ZCOUNT', P .. 'limiter', digits(now), '+inf') == 0
end
local function is_free()
  return is_bare() and (mode == 'restore' or call('ZCOUNT', P .. 'leases', digits(now), '+inf') == 0)
end
if stored == wanted or mode ~= 'follow' and (stored or wanted == '1' or not is_free()) then
  return {stored or '1', '0', spreads or ''}
end
if stored and version(stored) > version(wanted) then return {stored, '0', spreads or ''} end
--@include out_of_memory_guard
call('HSET', KEYS[1], 'partitions', wanted, 'sealed', seq or '0', 'spreads', ARGV[3])
-- A tenant that arrived by the map before has not arrived by this one.
call('UNLINK', P .. 'arrived')
if mode == 'follow' then
  local life_ms = tonumber(ARGV[4])
  for _, key in ipairs({KEYS[1], P .. 'wake', P .. 'leases', P .. 'limiter', P .. 'tombstones', P .. 'imported'}) do
    if life_ms > 0 then call('PEXPIRE', key, life_ms) else call('PERSIST', key) end
  end
end
return {wanted, '1', ARGV[3]}
