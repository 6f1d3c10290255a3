-- Take persons' items into a thread's inbox, each once. A thread that is not with us takes none: when it starts, its
-- list is read.
--
-- KEYS  1 inbox   hash: item id -> item as JSON; emptied by transition.lua when a turn has consumed it
--       2 seen    sorted set: item id -> Redis time in ms when it was taken; the newest are kept
--       3 record  hash: see fleet/record.py
-- ARGV  1 number of ids to remember
--       2.. id, item pairs
-- Returns how many items wait in the inbox.
redis.replicate_commands()
local step = redis.call('HGET', KEYS[3], 'step')
if not step or step == 'end' then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 2, #ARGV, 2 do
  if redis.call('ZADD', KEYS[2], 'NX', now, ARGV[i]) == 1 then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[1])
return redis.call('HLEN', KEYS[1])
