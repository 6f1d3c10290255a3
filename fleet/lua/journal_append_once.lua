-- Append entries that no turn numbers, once per cause.
--
-- KEYS  1 record         hash: see fleet/record.py
--       2 causes         sorted set: idempotency key -> Redis time in ms; the newest are kept, with an ended thread as
--                        long as its record
--       3 journal        stream, see journal_append.lua
--       4 journal meta   hash, see journal_append.lua
--       5 drain          string with expiry: token of the drainer
--       6 attention      sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 epoch that must be the record's, '' when it does not matter
--       3 idempotency key, made from the cause
--       4 number of causes to remember
--       5.. kind, post_id, body triples
-- Returns {1 when appended, 1 when a drainer must be called}.
redis.replicate_commands()
if ARGV[2] ~= '' and redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return {0, 0}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local idle = redis.call('EXISTS', KEYS[5]) == 0 and redis.call('EXISTS', KEYS[3]) == 1 and 1 or 0
if redis.call('ZADD', KEYS[2], 'NX', now, ARGV[3]) == 0 then
  return {0, idle}
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[4])
local kept = redis.call('PTTL', KEYS[1])
if kept > 0 then  -- the thread has ended
  redis.call('PEXPIRE', KEYS[2], kept)
  redis.call('HSET', KEYS[4], 'ended', '1')
end
local meta = redis.call('HMGET', KEYS[4], 'seq', 'bytes')
local seq = tonumber(meta[1] or 0)
local bytes = tonumber(meta[2] or 0)
for i = 5, #ARGV, 3 do
  seq = seq + 1
  redis.call('XADD', KEYS[3], seq .. '-0', 'kind', ARGV[i], 'post_id', ARGV[i + 1], 'body', ARGV[i + 2])
  bytes = bytes + #ARGV[i + 2]
end
redis.call('HSET', KEYS[4], 'seq', seq, 'bytes', bytes)
if redis.call('ZADD', KEYS[6], 'NX', now + 5000, ARGV[1]) == 0 then
  redis.call('ZINCRBY', KEYS[6], -1, ARGV[1])  -- for attention_settle.lua
end
return {1, redis.call('EXISTS', KEYS[5]) == 0 and 1 or 0}
