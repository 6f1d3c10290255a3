-- Park a prompt that was held for long enough, unless it has been answered in this very moment.
--
-- KEYS  1 prompt   hash: see fleet/prompts.py
-- ARGV  1 prompt id
-- Returns 1 when it is parked: its answer starts a new turn.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'state') ~= 'open' then
  return 0
end
redis.call('HSET', KEYS[1], 'parked', '1')
return 1
