-- Answer the open prompt of a thread with a person's item, once.
--
-- KEYS  1 prompt   hash: see fleet/prompts.py
--       2 seen     sorted set: item id -> Redis time in ms, see inbox_add.lua
-- ARGV  1 item id
--       2 answer, made from the item
--       3 prompt id for which it was made
-- Returns 1 when the item is the answer (now or by an earlier call), 0 when that prompt is not open.
redis.replicate_commands()
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[3] then
  return 0
end
if redis.call('HGET', KEYS[1], 'item') == ARGV[1] then
  return 1
end
if redis.call('TTL', KEYS[1]) >= 0 then
  return 0  -- the thread has ended; when it starts again, the item is read again
end
if redis.call('HGET', KEYS[1], 'state') ~= 'open' or redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'state', 'answered', 'item', ARGV[1], 'answer', ARGV[2])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], 'NX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
return 1
