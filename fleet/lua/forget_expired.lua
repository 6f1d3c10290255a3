-- Take a thread whose record has expired off the list of threads.
--
-- KEYS  1 threads   set: aliases with a record
--       2 record    hash: see fleet/record.py
-- ARGV  1 alias
-- Returns 1 when it was taken off.
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
return redis.call('SREM', KEYS[1], ARGV[1])
