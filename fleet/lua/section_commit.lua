-- Record what a poll has read: the cursor moves only together with the events that it passes becoming due.
--
-- KEYS  1 section     hash: see fleet/sections.py
--       2 lock        string with expiry: token of the poller
--       3 events      sorted set: event id -> Redis time in ms
--       4 due         hash: 'object ALIAS' -> number of changes noticed, 'item ALIAS ITEM' -> '1', 'list ALIAS' ->
--                     Redis time in ms from which on the list is to be read again, 'journal ALIAS' (it is being
--                     drained) -> anything.
--                     Emptied by the task that has handled it (due_done.lua)
--       5 due at      sorted set: alias -> Redis time in ms when to nudge again what is due
-- ARGV  1 token
--       2 cursor, as JSON; '' to leave it
--       3 ms for which event ids are remembered
--       4 ms until what is due is nudged again
--       5.. event id, kind ('object', 'item' or ''), alias, item id quadruples
-- Returns the distinct (kind, alias) that became due as a flat list, or {'lost'} when the poller lost its lock.
redis.replicate_commands()
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return {'lost'}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fresh, due = {}, {}
for i = 5, #ARGV, 4 do
  local id, kind, alias, item = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if redis.call('ZADD', KEYS[3], 'NX', now, id) == 1 and kind ~= '' then
    if kind == 'object' then
      redis.call('HINCRBY', KEYS[4], 'object ' .. alias, 1)
    else
      redis.call('HSET', KEYS[4], 'item ' .. alias .. ' ' .. item, '1')
    end
    if redis.call('ZADD', KEYS[5], 'NX', now + ARGV[4], alias) == 0 then
      redis.call('ZINCRBY', KEYS[5], -1, alias)  -- for attention_settle.lua
    end
    if not fresh[kind .. ' ' .. alias] then
      fresh[kind .. ' ' .. alias] = true
      due[#due + 1] = kind
      due[#due + 1] = alias
    end
  else
    redis.call('ZADD', KEYS[3], 'XX', now, id)
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'cursor', ARGV[2])
end
return due
