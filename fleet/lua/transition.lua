-- Move a thread from one step to another: compare-and-set with epoch and turn, and with the lease where a step is held.
--
-- KEYS  1 record      hash: see fleet/record.py
--       2 lease       string: token of the step's holder
--       3 attention   sorted set: alias -> Redis time in ms when to look at the thread again
--       4 inbox       hash: item id -> item
--       5 journal     stream, see journal_append.lua
--       6 meta        hash: the journal's numbers, see journal_append.lua
--       7 standing    hash: alias -> how often in a row reconcile found it standing still
--       8.. what else is kept of a thread for a while after its end
-- ARGV  1 alias
--       2 epoch
--       3 turn that the caller read
--       4 step the thread must be in
--       5 token that must hold the lease, '' when nobody may hold it, '*' when that does not matter
--       6 step to enter
--       7 ms until reconcile looks at it, '' when nothing is outstanding afterwards but what waits in the journal,
--         in the inbox or for a stop
--       8 '1' to give the lease up
--       9 ms for which record and KEYS 8.. are kept from now on, '' when the thread goes on
--      10 number of inbox ids that follow: they are consumed
--       then the ids, then field, value pairs to set
-- Returns 1, or 0 when the record is elsewhere by now.
redis.replicate_commands()
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] or redis.call('HGET', KEYS[1], 'step') ~= ARGV[4] or
    (redis.call('HGET', KEYS[1], 'turn') or '0') ~= ARGV[3] then
  return 0
end
local holder = redis.call('GET', KEYS[2]) or ''
if ARGV[5] ~= '*' and holder ~= ARGV[5] then
  return 0
end
redis.call('HSET', KEYS[1], 'step', ARGV[6])
local first = 11 + tonumber(ARGV[10])
for i = 11, first - 1 do
  redis.call('HDEL', KEYS[4], ARGV[i])
end
for i = first, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('HDEL', KEYS[7], ARGV[1])
if ARGV[8] == '1' then
  redis.call('DEL', KEYS[2])
end
if ARGV[9] ~= '' then
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
  for i = 8, #KEYS do
    redis.call('PEXPIRE', KEYS[i], ARGV[9])
  end
  if redis.call('EXISTS', KEYS[5]) == 1 then
    redis.call('HSET', KEYS[6], 'ended', '1')
  else
    redis.call('DEL', KEYS[6])
  end
end
local patience = ARGV[7]
if patience == '' and (redis.call('EXISTS', KEYS[5]) == 1 or (ARGV[6] == 'idle' and
    (redis.call('EXISTS', KEYS[4]) == 1 or (redis.call('HGET', KEYS[1], 'stop') or '') ~= ''))) then
  patience = 5000
end
if patience == '' then
  redis.call('ZREM', KEYS[3], ARGV[1])
else
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000) + patience, ARGV[1])
end
return 1
