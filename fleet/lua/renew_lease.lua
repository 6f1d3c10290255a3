-- Keep a lease alive and learn whether the holder should stop.
--
-- KEYS  1 record      hash: see fleet/record.py
--       2 lease       string with expiry: token of the step's holder
--       3 attention   sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 epoch
--       3 token
--       4 life of the lease in ms, '' to only look
-- Returns '' to go on, 'lost' when the lease is gone, 'superseded' when a newer epoch was claimed, else why to stop.
redis.replicate_commands()
if redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 'lost'
end
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return 'superseded'
end
if ARGV[4] ~= '' then
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4], ARGV[1])
end
return redis.call('HGET', KEYS[1], 'stop') or ''
