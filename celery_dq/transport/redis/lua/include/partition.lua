-- The partition: its commands, and the prefix of its keys.
local call = redis.call
local P = string.sub(KEYS[1], 1, -6)

-- While the keys of a slot move one by one, no node has all of them. A script that began there would fail halfway, so
-- it refuses to begin: the moving node refuses access to a key that it does not have.
--@cluster if type(redis.pcall('EXISTS', P .. 'none')) == 'table' then
--@cluster   return redis.error_reply('TRYAGAIN the slot of this partition moves to another node')
--@cluster end

-- Returns a number with all its digits; `..` and `tostring` round it. Whole numbers are formatted faster.
local function digits(number)
  return string.format(number % 1 == 0 and '%d' or '%.17g', number)
end

-- Fails if one of these fields is not a number; the short paths, which do not set it aside, ask this of `pcall`.
local function sum(a, b, c, d, e)
  local total = (a or 0) + (b or 0) + (c or 0) + (d or 0) + (e or 0)
  if total - total ~= 0 then error('not finite') end
  return total
end

-- Returns the number in a stored text; nil where there is none, because the text is absent or something else has written it.
local function finite(value)
  local number = tonumber(value or nil)
  return number and number - number == 0 and number or nil
end

-- Sends a command that takes a list, unless the list is empty.
local function write(command, key, list)
  if #list > 0 then call(command, key, unpack(list)) end
end
