-- The ids of messages.
--
-- A message id is the task id. While that is taken, a second message of the task has '~1' to '~9' or '~<seq>' behind
-- it. A '~' of the task id itself is doubled, so that no first id looks like the second id of another task.
function dq.plain_id(task_id)
  if string.find(task_id, '~', 1, true) then return (string.gsub(task_id, '~', '~~')) end
  return task_id
end

-- Returns the first message id of the task that has this one.
function dq.base_id(id)
  if not string.find(id, '~', 1, true) then return id end
  local base, run = string.match(id, '^(.-)(~+)%d+$')
  if run and #run % 2 == 1 then return base .. string.sub(run, 2) end
  return id
end

-- Returns the first ten message ids of a task.
function dq.ids_of(task_id)
  local base = dq.plain_id(task_id)
  local ids = {base}
  for i = 1, 9 do ids[i + 1] = base .. '~' .. i end
  return ids
end
