-- Strike what was handled off the due list.
--
-- KEYS  1 due   hash, see section_commit.lua
-- ARGV  field, value pairs: a field is struck off only when it still has that value
-- Returns how many were struck off.
local done = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    done = done + redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
return done
