"""URLs of the dashboard: ``path("dq/", include("celery_dq.contrib.django.urls"))``."""

from __future__ import annotations

from django.urls import path

from celery_dq.contrib.django.dashboard import dead_letters, links, messages, queues, quotas, status

app_name = "celery_dq"

urlpatterns = [
    path("", queues.QueuesView.as_view(), name="queues"),
    path("queue/", queues.QueueView.as_view(), name="queue"),
    path("queue/pause/", quotas.QueuePauseView.as_view(), name="queue-pause"),
    path("queue/resume/", quotas.QueueResumeView.as_view(), name="queue-resume"),
    path("tenant/", queues.TenantView.as_view(), name="tenant"),
    path("tenant/quota/", quotas.QuotaView.as_view(), name="quota"),
    path("tenant/quota/remove/", quotas.QuotaRemovalView.as_view(), name="quota-remove"),
    path("tenant/quota/undo/", quotas.QuotaUndoView.as_view(), name="quota-undo"),
    path("tenant/pause/", quotas.PauseView.as_view(), name="pause"),
    path("tenant/resume/", quotas.ResumeView.as_view(), name="resume"),
    path("message/", messages.MessageView.as_view(), name="message"),
    path("message/cancel/", messages.CancelView.as_view(), name="cancel"),
    path("message/reschedule/", messages.RescheduleView.as_view(), name="reschedule"),
    path("message/reprioritise/", messages.ReprioritiseView.as_view(), name="reprioritise"),
    path("message/arguments/", messages.ArgumentsView.as_view(), name="message-edit"),
    path("message/arguments/edit/", messages.ArgumentsEditView.as_view(), name="message-arguments"),
    path("message/move/", messages.MoveView.as_view(), name="move"),
    path("dead-letters/", dead_letters.DeadLettersView.as_view(), name="dead-letters"),
    path("dead-letters/replay/", dead_letters.ReplayView.as_view(), name="replay"),
    path("dead-letters/replay/steps/", dead_letters.ReplayStepsView.as_view(), name="replay-steps"),
    path("dead-letters/letter/", dead_letters.LetterView.as_view(), name="dead-letter"),
    path("dead-letters/letter/edit/", dead_letters.LetterEditView.as_view(), name="dead-letter-edit"),
    path("dead-letters/purge/", dead_letters.PurgeView.as_view(), name="purge"),
    path("dedup/", status.DedupLocksView.as_view(), name="dedup-locks"),
    path("dedup/release/", status.ReleaseView.as_view(), name="release"),
    path("leaders/", status.LeadersView.as_view(), name="leaders"),
    path("workers/", status.WorkersView.as_view(), name="workers"),
    path("audit/", status.AuditView.as_view(), name="audit"),
    path("assets/<str:name>", links.asset, name="asset"),
]
