-- The flags of an in-flight message. A `SETTLED` message is never delivered again. A `DISCARD` was delivered for its
-- bookkeeping and took neither permit nor slot. An `EARLY` message was taken by name before it was due. A `KEYED`
-- message has a dedup key in its record.
local SETTLED, DISCARD, EARLY, KEYED = 1, 2, 4, 8
-- The places of the flags and of the tenant in its entry.
local FLAGS_AT, TENANT_AT = 25, 34
