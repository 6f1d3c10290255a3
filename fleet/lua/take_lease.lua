-- Begin a step: right epoch, turn and step, and no live lease -> take it.
--
-- KEYS  1 record      hash: see fleet/record.py
--       2 lease       string with expiry: token of the step's holder
--       3 attention   sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 epoch
--       3 turn
--       4 step
--       5 token
--       6 life of the lease in ms
--       7 '1' to count this as a further attempt
-- Returns 'taken', 'held' (somebody has it) or 'stale' (the record is elsewhere).
redis.replicate_commands()
local record = redis.call('HMGET', KEYS[1], 'epoch', 'step', 'turn')
if record[1] ~= ARGV[2] or record[2] ~= ARGV[4] or (record[3] or '0') ~= ARGV[3] then
  return 'stale'
end
if not redis.call('SET', KEYS[2], ARGV[5], 'NX', 'PX', ARGV[6]) then
  return 'held'
end
if ARGV[7] == '1' then
  redis.call('HINCRBY', KEYS[1], 'attempt', 1)
end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[6], ARGV[1])
return 'taken'
