-- Keep a lease that one holds alive.
--
-- KEYS  1 lease   string with expiry: token of the holder
-- ARGV  1 token
--       2 life of the lease in ms
-- Returns 1 when it was held by the caller.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
