-- Append a turn's items, numbered by the turn, under its lease.
--
-- KEYS  1 record         hash: see fleet/record.py
--       2 lease          string: token of the step's holder
--       3 journal        stream: entries in the order in which they are to be stored.
--                        id SEQ-0; fields kind (item, audit, state), body (JSON), post_id
--       4 journal meta   hash: epoch, turn, n (the last item taken from that turn), seq (the last entry's number),
--                        bytes (of all bodies in the stream), inflight (seq that a drainer may have posted),
--                        run (of the Redis that last handed out an entry), since (Redis time in ms from which on
--                        Redis forgot nothing),
--                        ended (the thread has: no turn needs the numbers, and they go with the last entry)
--       5 drain          string with expiry: token of the drainer
--       6 attention      sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 epoch
--       3 token
--       4 turn
--       5 '1' when the items may have been appended, and even posted, before: Redis lacks them
--       6.. n, post_id, body triples, ascending in n
-- Returns {last n taken, entries in the journal, bytes in the journal, 1 when a drainer must be called};
-- a last n of -1: the caller does not hold the lease. Older numbers are ignored, a gap ends the call.
redis.replicate_commands()
if redis.call('GET', KEYS[2]) ~= ARGV[3] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return {-1, 0, 0, 0}
end
local meta = redis.call('HMGET', KEYS[4], 'turn', 'n', 'seq', 'bytes', 'epoch')
local same = meta[1] == ARGV[4] and (not meta[5] or meta[5] == ARGV[2])
local last = same and tonumber(meta[2]) or 0
local seq = tonumber(meta[3] or 0)
local bytes = tonumber(meta[4] or 0)
for i = 6, #ARGV, 3 do
  local n = tonumber(ARGV[i])
  if n > last + 1 then
    break
  end
  if n == last + 1 then
    seq = seq + 1
    redis.call('XADD', KEYS[3], seq .. '-0', 'kind', 'item', 'post_id', ARGV[i + 1], 'body', ARGV[i + 2])
    bytes = bytes + #ARGV[i + 2]
    last = n
  end
end
redis.call('HSET', KEYS[4], 'epoch', ARGV[2], 'turn', ARGV[4], 'n', last, 'seq', seq, 'bytes', bytes)
if ARGV[5] == '1' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[4], 'since', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
end
local idle = redis.call('EXISTS', KEYS[5]) == 0 and 1 or 0
return {last, redis.call('XLEN', KEYS[3]), bytes, idle}
