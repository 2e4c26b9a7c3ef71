--@include state
-- A full server (maxmemory with noeviction) refuses what may need memory, until a script has written something.
-- What takes messages out must go on there, or the server would stay full: this write changes nothing.
call('HDEL', KEYS[1], '')
