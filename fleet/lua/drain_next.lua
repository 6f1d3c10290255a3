-- Drain a journal: begin, take the stored entry away, hand out the next one, or give the lease up when none is left.
-- One script, so that an append sees either a live drainer that will find it, or none.
--
-- KEYS  1 drain          string with expiry: token of the one drainer of the thread
--       2 journal        stream, see journal_append.lua
--       3 journal meta   hash, see journal_append.lua
--       4 ours           sorted set: ids of items that we stored -> Redis time in ms
--       5 due            hash, see section_commit.lua: the journal is due for as long as it is being drained
--       6 due at         sorted set: alias -> Redis time in ms when to nudge again what is due
-- ARGV  1 token
--       2 life of the lease in ms
--       3 id of the entry that was stored, '' to begin
--       4 id that the platform gave it, '' when it is no item
--       5 alias
-- Returns {'busy'} (another drainer), {'lost'}, {'empty'} or
-- {'entry', id, kind, post_id, body, '1' when it may have been posted already, since, ms that have passed since then}.
redis.replicate_commands()
if ARGV[3] == '' then
  if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return {'busy'}
  end
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[5], 'journal ' .. ARGV[5], '1')
  if redis.call('ZADD', KEYS[6], 'NX', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[5]) == 0 then
    redis.call('ZINCRBY', KEYS[6], -1, ARGV[5])  -- for attention_settle.lua
  end
else
  if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return {'lost'}
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  local stored = redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3])
  if stored[1] then
    local fields = stored[1][2]
    for i = 1, #fields, 2 do
      if fields[i] == 'body' then
        redis.call('HINCRBY', KEYS[3], 'bytes', -#fields[i + 1])
      end
    end
    redis.call('XDEL', KEYS[2], ARGV[3])
  end
  if ARGV[4] ~= '' then
    local time = redis.call('TIME')
    redis.call('ZADD', KEYS[4], time[1] * 1000 + math.floor(time[2] / 1000), ARGV[4])
  end
end
local head = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
-- A Redis that was started again, or a replica that took over, may have lost its last moments, and what was stored in
-- them. That it lost all of them shows where it knows of no journal yet: that matters only while it is young.
local server = redis.call('INFO', 'server')
local run = string.match(server, 'run_id:(%x+)')
local before = redis.call('HGET', KEYS[3], 'run')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if before ~= run and (before or head) then
  local since = before and now or now - string.match(server, 'uptime_in_seconds:(%d+)') * 1000
  redis.call('HSET', KEYS[3], 'run', run, 'since', string.format('%.0f', since))
end
if not head then
  redis.call('HDEL', KEYS[3], 'inflight')
  redis.call('DEL', KEYS[1], KEYS[2])
  if redis.call('HGET', KEYS[3], 'ended') then
    redis.call('DEL', KEYS[3])
  end
  redis.call('HDEL', KEYS[5], 'journal ' .. ARGV[5])
  return {'empty'}
end
local again = redis.call('HGET', KEYS[3], 'inflight') == head[1] and '1' or '0'
redis.call('HSET', KEYS[3], 'inflight', head[1])
local since = redis.call('HGET', KEYS[3], 'since')
local entry = {}
for i = 1, #head[2], 2 do
  entry[head[2][i]] = head[2][i + 1]
end
return {'entry', head[1], entry.kind, entry.post_id, entry.body, again, since, now - since}
