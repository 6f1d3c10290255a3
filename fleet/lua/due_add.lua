-- Put something on the due list.
--
-- KEYS  1 due      hash, see section_commit.lua
--       2 due at   sorted set: alias -> Redis time in ms when to nudge again what is due
-- ARGV  1 alias
--       2 field
--       3 ms until it is nudged
redis.replicate_commands()
local time = redis.call('TIME')
local at = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f', at))
if redis.call('ZADD', KEYS[2], 'CH', 'LT', at, ARGV[1]) == 0 then
  redis.call('ZINCRBY', KEYS[2], -1, ARGV[1])  -- for attention_settle.lua
end
return 1
