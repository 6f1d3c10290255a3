-- Strike a thread off a list of those with something outstanding, unless it was put there anew meanwhile.
-- Whoever puts a thread on a list changes its score, by 1 ms where an earlier time stands: so it is seen here.
--
-- KEYS  1 list   sorted set: alias -> Redis time in ms when to look at the thread again
-- ARGV  1 alias
--       2 score that the caller read
-- Returns 1 when it was struck off.
if redis.call('ZSCORE', KEYS[1], ARGV[1]) == ARGV[2] then
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
return 0
