-- Take a place in a work folder, or join those who wait for one.
--
-- KEYS  1 running   sorted set: thread -> Redis time in ms until which its turn is known to run in the folder
--       2 waiting   sorted set: thread -> Redis time in ms since when its turn waits for a place
--                   Both expire: a place when its time is over, the line an hour after the last thread joined or asked
--                   again, which is longer than any pause of reconcile.
-- ARGV  1 thread
--       2 places, 0 for no limit
--       3 ms for which the place is taken unless it is taken anew
-- Returns 1 when the thread has a place.
redis.replicate_commands()
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local places = tonumber(ARGV[2])
local has_place = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not has_place and places > 0 and redis.call('ZCARD', KEYS[1]) >= places then
  redis.call('ZADD', KEYS[2], 'NX', now, ARGV[1])
  redis.call('PEXPIRE', KEYS[2], 3600000)
  return 0
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
