-- How many messages a tenant may be given before it is another tenant's turn.
--@uses fair_turn
-- Args: the tenant; `follower`, the tenant behind it, or nil; `most`, for how many messages there are free slots;
-- `free`, how many of these may belong to tenants with a concurrency limit.
function dq.run_length(tenant, follower, most, free)
  local quota = tenant.quota
  local capped, rated = quota.concurrency > 0, quota.interval > 0
  if follower and follower.tag < tenant.tag + tenant.cost then return 1 end
  if not follower and not capped and not rated then return most end
  local after = {tag = tenant.tag, name = tenant.name}
  local arrival, run = tenant.arrival, 0
  if capped then most = math.min(most, free, quota.concurrency - tenant.slots) end
  while run < most do
    run = run + 1
    after.tag = after.tag + tenant.cost
    if rated then
      arrival = dq.take_permit(arrival, quota)
      if arrival - quota.tolerance > now then break end
    end
    if follower and not dq.is_before(after, follower) then break end
  end
  return run
end
