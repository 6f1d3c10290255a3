-- Claim the next epoch of a thread, if its record is still the one that the caller read.
--
-- KEYS  1 record      hash: see fleet/record.py
--       2 attention   sorted set: alias -> Redis time in ms when to look at the thread again
--       3 threads     set: aliases with a record
--       4 standing    hash: alias -> how often in a row reconcile found it standing still
--       5 meta        hash: the journal's numbers, see journal_append.lua
--       6.. what else was kept of the thread when it ended
-- ARGV  1 alias
--       2 epoch that the caller read, '' for no record
--       3 step that the caller read, '' for no record
--       4 step to enter: start or wait_host
--       5 ms until reconcile looks at it
--       6 epoch that the new one must be above, whatever Redis's clock says
--       7.. field, value pairs to set
-- Returns the new epoch, or '' when the record has changed meanwhile.
redis.replicate_commands()
local epoch = redis.call('HGET', KEYS[1], 'epoch') or ''
local step = redis.call('HGET', KEYS[1], 'step') or ''
if epoch ~= ARGV[2] or step ~= ARGV[3] then
  return ''
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed = math.max(now, (tonumber(epoch) or 0) + 1, tonumber(ARGV[6]) + 1)
local text = string.format('%.0f', claimed)
redis.call('HSET', KEYS[1], 'epoch', text, 'step', ARGV[4], 'attempt', '0')
redis.call('HDEL', KEYS[1], 'stop', 'outcome', 'error', 'told', 'turn_items', 'prompted')
for i = 7, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PERSIST', KEYS[1])
for i = 6, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HDEL', KEYS[4], ARGV[1])
redis.call('HDEL', KEYS[5], 'ended')
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[2], now + ARGV[5], ARGV[1])
return text
