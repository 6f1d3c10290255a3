-- Make a prompt the thread's open one.
--
-- KEYS  1 prompt   hash: see fleet/prompts.py
--       2 lease    string with expiry: token of the step's holder
-- ARGV  1 token that must hold the lease, '' when nobody need hold one
--       2.. field, value pairs
-- Returns 1, or 0 when the lease is somebody else's by now.
if ARGV[1] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return 1
