-- Lets a script run on a server that is out of memory.
--@include partition
-- A full server (maxmemory with noeviction) refuses commands that may need memory until the script has written
-- something. Scripts that remove messages must run there, or the server would stay full. This write changes nothing.
call('HDEL', KEYS[1], '')
