-- Set fields of a record that is still of the caller's epoch.
--
-- KEYS  1 record      hash: see fleet/record.py
--       2 lease       string: token of the step's holder
--       3 attention   sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 epoch
--       3 token that must hold the lease, '*' when that does not matter
--       4 ms until reconcile looks at it, '' to leave that as it is
--       5.. field, value pairs
-- Returns 1, or 0 when nothing was set.
redis.replicate_commands()
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return 0
end
if ARGV[3] ~= '*' and redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 0
end
for i = 5, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if ARGV[4] ~= '' then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4], ARGV[1])
end
return 1
