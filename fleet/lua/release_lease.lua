-- Give up a lease that one holds.
--
-- KEYS  1 lease   string: token of the holder
-- ARGV  1 token
-- Returns 1 when it was held by the caller.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
