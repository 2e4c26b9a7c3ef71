-- The time of the server, in µs.
--@include partition
local now
do
  local clock = call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
