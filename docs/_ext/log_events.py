"""The names that log records carry as ``event``, for ``reference/log-events.rst``.

Each log call at level INFO or above passes ``extra={"event": "..."}`` with one of these names. The names are
part of the interface: the text of a message may change, but the name of its event does not.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EVENTS"]

#: Event name to the meaning and the consequence of the record, one sentence.
EVENTS: Final[dict[str, str]] = {
    # Broker on Redis.
    "audit_not_written": "A change through app.dq was made, and could not be written to the audit stream.",
    "ack_failed": (
        "An ack or a reject raised an error; a recorded one is sent again, otherwise the task may run again."
    ),
    "acks_lost_at_exit": "A worker could not send its last acks at its exit; the tasks may run again.",
    "batch_sent_again": "A batch of messages got no answer from Redis; it is sent again and stored once.",
    "broker_given_up": (
        "Redis has not answered for many leases; a process forgets a queue that it consumes no more."
    ),
    "channel_closed_without_answer": (
        "Redis did not answer while a channel was closed; the heartbeat thread sends the pending acks."
    ),
    "claims_lost": "Redis has lost the claims of messages that a worker runs; they may run a second time.",
    "data_lost": "Redis has lost all data of a queue.",
    "entries_set_aside": (
        "Entries of a queue that another program has written were set aside; messages that they named wait "
        "for ``celery dq dead recover``."
    ),
    "exit_without_answer": (
        "A worker exits while its heartbeat waits for Redis; tasks that ended last may run again."
    ),
    "fenced_out": "This worker does not lead a singleton queue any more; the new leader gets the messages.",
    "heartbeat_failed": (
        "A heartbeat failed with an unexpected error, which is in the record; the next one follows."
    ),
    "lease_lost": (
        "A worker's lease had expired; messages that had not begun are dropped, other workers may have them."
    ),
    "lease_not_renewed": (
        "A heartbeat got no answer; if that goes on, other workers get the messages of this one."
    ),
    "lease_renewed_again": "Heartbeats are answered again after ``lease_not_renewed``.",
    "lost_acks_released": (
        "Redis has lost acks that it had confirmed; the messages go back to the queue and may run again."
    ),
    "live_default_quota": "A default quota that was set live wins over the one of a worker's settings.",
    "message_discarded": (
        "An expired, cancelled or dead message was finished without running; Celery has no record of it."
    ),
    "older_settings_quota": (
        "A worker's settings have a quota that was replaced a short while ago; it is not applied."
    ),
    "outbox_not_delivered": (
        "Replicas are missing, and a command goes on without messages that a change of partitions took out."
    ),
    "partition_gone": (
        "A worker was started for one partition of a queue, which has fewer now; it gets no messages."
    ),
    "partitions_followed": "The number of partitions has changed, and a worker consumes the new ones.",
    "tenant_spread_by_rate": "The rate of a tenant's quota has changed the number of its partitions.",
    "partitions_not_followed": "A worker cannot consume the new partitions; it goes on as before.",
    "partitions_differ": (
        "The settings name another number of partitions than the broker has stored, which is used."
    ),
    "queue_name_doubtful": (
        "A worker consumes a queue that never had a message, and whose name is close to that of another one."
    ),
    "redis_full": "The memory of Redis is full; publishing is refused until workers have emptied its queues.",
    "redis_refuses_began": "Redis answers commands of a worker with an error; they are sent again.",
    "redis_refuses_over": "Redis accepts the commands again after ``redis_refuses_began``.",
    "server_unchecked": (
        "The Redis user may not send INFO; the server's version and eviction policy are not checked."
    ),
    "settings_quota_changed": "A worker's settings have changed the quota of the tenants of a queue.",
    "singleton_queue_without_election": (
        "A worker consumes a singleton queue without an election; it gets no messages."
    ),
    "tls_without_verification": (
        "``dq-rediss://`` has no setting for certificates; the connection is encrypted, but trusts any host."
    ),
    "unanswered_claim_released": (
        "Messages of a claim whose answer was lost were released; other workers get them."
    ),
    "unreadable_message_dead_lettered": (
        "A stored message could not be read; it was moved to the dead letters of its queue."
    ),
    "void_claim": "The answer to a claim came after its lease was lost; its messages are not started here.",
    "watchdog_stopped_worker": (
        "Nothing was claimed for twice dq_watchdog despite a backlog; the worker stops, to be started again."
    ),
    "span_not_recorded": "The tracer of the app failed; messages are sent and delivered without spans.",
    "worker_lost": "A worker's lease has expired; the record names its messages and which of them run again.",
    "writes_lost": "Redis has lost its latest writes to a queue; messages may be gone or run again.",
    # Brokers whose fetcher has a thread: ZooKeeper, and stores of one's own.
    "broadcast_dropped": "A transient queue was too long and got no copy of a broadcast.",
    "transient_message_dropped": "A worker could not handle a command, an event or a reply, and went on.",
    "store_fetcher_failed": "A store failed, its connection ends and its messages are served again.",
    # Broker on ZooKeeper, ZooKeeper sessions, Curator queues.
    "curator_consumer_abandoned": "A consumer did not end in time, and its item is consumed again later.",
    "curator_finish_began": "A consumer cannot finish nodes, which stay locked until it succeeds.",
    "curator_finish_delayed": "ZooKeeper did not answer while nodes were finished, which is tried again.",
    "curator_finish_over": "A consumer finishes nodes again.",
    "curator_foreign_node": "A node does not belong to the kind of its queue and is ignored.",
    "curator_item_failed": "The function of a consumer raised, and its item is requeued or deleted.",
    "curator_node_in_doubt": "A node that a consumer without locks may have deleted may be lost.",
    "curator_node_lost": "A session expired while a node was consumed, so that it is consumed twice.",
    "curator_node_unreadable": "A node cannot be read and stays in the queue for another consumer.",
    "curator_put_began": "Puts in the background fail and are tried again.",
    "curator_put_listener_failed": "A put listener raised an error after its node was created.",
    "curator_put_over": "Puts in the background succeed again.",
    "curator_serializer_failed": "The serializer raised an error, and the node stays in the queue.",
    "curator_take_began": "A consumer cannot take or start nodes and tries again.",
    "curator_take_delayed": "ZooKeeper did not answer while nodes were taken, which is tried again.",
    "curator_take_over": "A consumer takes nodes again.",
    "zookeeper_delayed_name_invalid": "A node among the delayed items has an invalid name and is ignored.",
    "zookeeper_fetch_interrupted": "ZooKeeper did not answer a round of fetching, which is tried again.",
    "zookeeper_fetcher_failed": "The fetcher failed, its connection ends and its messages are served again.",
    "zookeeper_item_denied": "The ACL of a message denies the worker, so that the message waits.",
    "zookeeper_listener_failed": "A listener of a session raised an error, and the session continues.",
    "zookeeper_message_dead_lettered": "A message lost too many consumers and became a dead letter.",
    "zookeeper_message_unreadable": "A message cannot be decoded and was moved to the unreadable items.",
    "zookeeper_outage_began": (
        "No server of ZooKeeper accepts a process; what the process holds there ends with its session."
    ),
    "zookeeper_outage_over": "A server accepts the process again after ``zookeeper_outage_began``.",
    "zookeeper_sweep_failed": "The sweep of transient queues failed and is tried again later.",
    "zookeeper_transient_queue_deleted": "A transient queue without a user was deleted.",
    "zookeeper_zxid_forgotten": "No server accepted the client for long, so it forgets the latest change.",
    # Worker, tasks.
    "deliveries_exhausted": "Too many workers that ran a task were lost; it fails as a dead letter.",
    "invalid_task_dead_lettered": "No task can be made of a message; it is a dead letter.",
    "redis_rights_missing": "The broker's Redis user lacks rights; operations that need them fail.",
    "singleton_queue_outage_began": "The broker fails for a singleton queue; the leader cannot consume it.",
    "singleton_queue_outage_over": "The broker answers again; the leader consumes its singleton queue.",
    "task_pushed_out": "Newer calls have pushed a task out of a full backlog; it fails as a dead letter.",
    "task_failure_not_recorded": "The failure of a dead-lettered task is not in the result backend.",
    "tracer_provider_missing": "A worker has no tracer provider in its main process; spans are lost.",
    "unknown_task_dead_lettered": "A worker does not know a task; its message is a dead letter.",
    "task_end_not_recorded": "The end of a task could not be stored in the result backend.",
    "task_not_started": "A lease or term was not renewed in time; the task was released unstarted.",
    "task_option_wrong": "A task has a wrong or misspelt option tenant or dedup; calls fail or ignore it.",
    "task_throttled": "A task raised Throttled; it was requeued, and its tenant is paused until then.",
    "task_waits_for_predecessor": "The message before it will return; the task was released unstarted.",
    "throttled_tenant_not_paused": (
        "A throttled tenant could not be paused in all of its partitions; its tasks there still run."
    ),
    "tenants_not_enforced": "The broker has no tenants; tenants and quotas of the app are ignored.",
    # Dedup.
    "dedup_call_declined": "Another call covers the call, which does not run.",
    "dedup_evictions_not_received": "A worker listens to no evictions; lost dedup locks are not reported.",
    "dedup_key_invalid": "No dedup key can be made of the arguments of a task, which fails.",
    "dedup_lock_lost": "A run lost its dedup lock; another run of the same key may begin.",
    "dedup_lock_release_failed": "A dedup lock was not released; it ends with its lease.",
    "dedup_outage_began": "The Redis of the dedup locks gives no answer or refuses writes; keyed calls wait.",
    "dedup_outage_over": "The Redis of the dedup locks answers again; waiting calls request their locks.",
    "dedup_redelivery_dropped": "A task was delivered twice; one delivery ends, and the other continues.",
    "dedup_renewal_began": "The dedup locks of a process are not renewed; they end with their leases.",
    "dedup_renewal_over": "The dedup locks of a process are renewed again.",
    "dedup_request_failed": "The Redis of the dedup locks refused a request; the task waits, and repeats it.",
    "dedup_result_not_received": "A duplicate did not get the result of its covering call; it has no result.",
    "dedup_results_began": "The result backend gives no answer; declined calls wait for their result.",
    "dedup_results_over": "The result backend answers again; declined calls get their result.",
    # Metrics.
    "metrics_outage_began": "The broker cannot be read for the metrics, or not in time; celery_dq_up is 0.",
    "metrics_outage_over": "The state of the broker can be read for the metrics again.",
    "metrics_port_unavailable": "A worker serves no metrics, because it cannot listen on dq_metrics_port.",
    "metrics_served": "A worker or an exporter serves metrics; the record names the address.",
    # Probes.
    "probe_file_outage_began": "A worker cannot write dq_probe_file; it goes on, and probes call it dead.",
    "probe_file_shared": "Two workers keep one dq_probe_file, and each hides the end of the other one.",
    "probe_file_outage_over": "A worker writes dq_probe_file again.",
    # Publishing and the buffer.
    "publish_waits_for_broker": "A call of a running task waits until the broker takes it.",
    "buffer_flusher_not_started": (
        "The thread that sends buffered messages could not start, because the interpreter ends; messages on "
        "disk are sent by a later process."
    ),
    "buffer_flusher_not_stopped": (
        "The buffer was closed, but its thread is still in a call to the broker; messages on disk are sent "
        "later, by this process after the call or by another one, and the other ones are reported to "
        "``on_error``."
    ),
    "buffer_flusher_error": (
        "The thread that sends buffered messages met an unexpected error; it continues, and a second error "
        "of the same kind is not logged."
    ),
    "buffer_hook_failed": "A callback of the buffer raised an exception; the delivery of messages is not "
    "affected.",
    "buffer_broker_unreachable": "The broker does not answer; buffered messages are kept and sent again "
    "later.",
    "buffer_lane_deferred": (
        "The broker did not accept a batch for one destination; only messages for that destination wait."
    ),
    "buffer_delivery_resumed": "The broker accepts buffered messages again.",
    "outbox_outage_began": (
        "The relay of an outbox cannot read or write its database; the rows stay and are sent later."
    ),
    "outbox_outage_over": "The outbox can be relayed again.",
    "buffer_message_refused": (
        "The broker will never accept a message, or its tenant is full (``max_waiting``); it is kept in the "
        "quarantine of the spill log, if there is one, and ``on_error`` is called."
    ),
    "spill_adopted": "A process adopted the messages that a dead process left in the spill log, and sends "
    "them.",
    "spill_unreadable_began": (
        "A folder that a dead process left in the spill log cannot be read; its messages wait until it can."
    ),
    "spill_unreadable_over": "All folders of the spill log can be read again.",
    "spill_quarantined": (
        "A file of the spill log that cannot be read at all was moved to the quarantine; its messages are "
        "not sent."
    ),
    "spill_damaged": (
        "Parts of a file of the spill log are damaged and were copied to the quarantine; its other messages "
        "are sent."
    ),
    "spill_quarantine_failed": (
        "A damaged file of the spill log could not be moved to the quarantine; it is logged once per file."
    ),
    "spill_unwritable": (
        "The spill log cannot be written; new messages are held in memory only and do not survive the "
        "process."
    ),
    "spill_writable": "The spill log can be written again.",
    "spill_folder_removed": (
        "The folder of this process in the spill log was removed; the messages in memory are written to a "
        "new one."
    ),
    "spill_sync_failed": (
        "The disk did not confirm that it wrote a file of the spill log; its messages are written to a new "
        "file."
    ),
    # Leadership, singleton queues, beat.
    "abort_failed": "The callback that stops a term's work raised, so that the work may continue.",
    "beat_clock_ahead": "The clock of the last leading beat was ahead, and its times were corrected.",
    "beat_fenced": "A beat does not lead, or is not sure that it leads, and sends no tick.",
    "beat_leads": "A beat was elected and has taken over the schedule.",
    "beat_outage_began": "The broker, election or schedule store of a beat does not answer; no tick is sent.",
    "beat_outage_over": "The broker, election and schedule store of a beat answer again.",
    "beat_tick_unrecorded": "A tick was sent without a record, so that a new leader may send it again.",
    "candidacy_failed": "A candidate met an unexpected error and tries again.",
    "candidacy_not_withdrawn": "A candidate was left in the line, and the next leader may have to wait.",
    "career_message_lost": "A message was not executed to its end and could not be given back.",
    "election_misconfigured": "An election cannot be held with its settings, and the candidate tries again.",
    "election_not_won": "A candidate did not win an election and tries again.",
    "election_outage_began": "An election does not answer, so that the process cannot be elected.",
    "election_outage_over": "The election answers again.",
    "fence_outage_began": "The broker does not answer, so that a term waits for its fence.",
    "fence_outage_over": "The broker has raised the fence of a queue after an outage.",
    "guard_alarm_handled": "Other code handles SIGALRM, so that a message may run after its term.",
    "guard_message_refused": "A message was started after the end of its term, and its process was killed.",
    "handover_timed_out": "A leadership was not handed over in time, so that its successor waits.",
    "leader_elected": "A candidate was elected.",
    "resignation_failed": "A resignation was not confirmed and is sent again.",
    "singleton_queue_led": "A worker leads a singleton queue and consumes it.",
    "term_failed": "The work of a term raised an error, and the term ends.",
    "term_fallen": "A term was not renewed in time, its work is stopped and another candidate may lead.",
    "term_over": "No work of a term runs any more.",
    "term_renewal_failed": "A renewal was not confirmed and is tried again.",
    # Allocation.
    "allocation_changed": "A worker serves other partitions than before.",
    "allocation_draining": "A worker gives its partitions to other workers, as it was asked to.",
    "allocation_failed": "A worker cannot follow the allocation after an unexpected error; it tries again.",
    "allocation_missing": (
        "A worker has found no assignment for a session, and serves all partitions of its queues."
    ),
    "allocation_not_left": (
        "A stopping worker could not tell ZooKeeper; its partitions wait until its session ends."
    ),
    "allocation_not_published": "The assignment is too large for ZooKeeper; the last one stays in force.",
    "allocation_outage_began": "ZooKeeper does not answer; a worker keeps the partitions that it serves.",
    "allocation_outage_over": "ZooKeeper answers again after ``allocation_outage_began``.",
    "allocation_published": "The allocator has put another assignment in force.",
    "allocation_withdrawn": (
        "A worker gives its partitions to other workers, because the broker does not answer it."
    ),
    # Settings, set-up, command line, dashboard.
    "queue_name_unreadable": "A queue's name in Redis is not UTF-8; the queue is left out.",
    "dashboard_login_refused": "A wrong password was given for 'celery dq web'; it is answered half a second "
    "later.",
    "dashboard_change": "A user of the dashboard changed something; the record names user, queue and tenant.",
    "history_not_sampled": "A fault kept the dashboard from sampling a queue for its history.",
}
