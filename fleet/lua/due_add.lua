-- Put something on the due list.
--
-- KEYS  1 due      hash, see section_commit.lua
--       2 due at   sorted set: alias -> Redis time in ms when to nudge again what is due
-- ARGV  1 alias
--       2 field
--       3 ms until it is nudged
redis.replicate_commands()
redis.call('HSET', KEYS[1], ARGV[2], '1')
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], 'LT', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
return 1
