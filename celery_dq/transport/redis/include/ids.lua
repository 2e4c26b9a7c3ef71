-- Message ids. A message id is the task id, and '~1' to '~9' or '~<seq>' behind it while that one is taken.
-- A '~' of the task id itself is doubled, so that nobody's id can look like another one's second message.
local function plain_id(task_id)
  if string.find(task_id, '~', 1, true) then return (string.gsub(task_id, '~', '~~')) end
  return task_id
end

-- The first message id that this one's task would have.
local function base_id(id)
  if not string.find(id, '~', 1, true) then return id end
  local base, run = string.match(id, '^(.-)(~+)%d+$')
  if run and #run % 2 == 1 then return base .. string.sub(run, 2) end
  return id
end

-- The message ids to look at for a task.
local function ids_of(task_id)
  local base = plain_id(task_id)
  local ids = {base}
  for i = 1, 9 do ids[i + 1] = base .. '~' .. i end
  return ids
end
