"""URLs of the dashboard: ``path("dq/", include("celery_dq.contrib.django.urls"))``."""

from __future__ import annotations

from django.urls import path

from celery_dq.contrib.django.dashboard.dead_letters import (
    DeadLettersView,
    PurgeView,
    ReplayStepsView,
    ReplayView,
)
from celery_dq.contrib.django.dashboard.dedup_locks import DedupLocksView, ReleaseView
from celery_dq.contrib.django.dashboard.edits import (
    ArgumentsEditView,
    ArgumentsView,
    LetterEditView,
    LetterView,
    MoveView,
    ReprioritiseView,
    RescheduleView,
)
from celery_dq.contrib.django.dashboard.links import asset
from celery_dq.contrib.django.dashboard.messages import CancelView, MessageView
from celery_dq.contrib.django.dashboard.queues import QueuesView, QueueView, TenantView
from celery_dq.contrib.django.dashboard.quotas import (
    PauseView,
    QueuePauseView,
    QueueResumeView,
    QuotaRemovalView,
    QuotaUndoView,
    QuotaView,
    ResumeView,
)
from celery_dq.contrib.django.dashboard.status import AuditView, LeadersView, WorkersView

app_name = "celery_dq"

urlpatterns = [
    path("", QueuesView.as_view(), name="queues"),
    path("queue/", QueueView.as_view(), name="queue"),
    path("queue/pause/", QueuePauseView.as_view(), name="queue-pause"),
    path("queue/resume/", QueueResumeView.as_view(), name="queue-resume"),
    path("tenant/", TenantView.as_view(), name="tenant"),
    path("tenant/quota/", QuotaView.as_view(), name="quota"),
    path("tenant/quota/remove/", QuotaRemovalView.as_view(), name="quota-remove"),
    path("tenant/quota/undo/", QuotaUndoView.as_view(), name="quota-undo"),
    path("tenant/pause/", PauseView.as_view(), name="pause"),
    path("tenant/resume/", ResumeView.as_view(), name="resume"),
    path("message/", MessageView.as_view(), name="message"),
    path("message/cancel/", CancelView.as_view(), name="cancel"),
    path("message/reschedule/", RescheduleView.as_view(), name="reschedule"),
    path("message/reprioritise/", ReprioritiseView.as_view(), name="reprioritise"),
    path("message/arguments/", ArgumentsView.as_view(), name="message-edit"),
    path("message/arguments/edit/", ArgumentsEditView.as_view(), name="message-arguments"),
    path("message/move/", MoveView.as_view(), name="move"),
    path("dead-letters/", DeadLettersView.as_view(), name="dead-letters"),
    path("dead-letters/replay/", ReplayView.as_view(), name="replay"),
    path("dead-letters/replay/steps/", ReplayStepsView.as_view(), name="replay-steps"),
    path("dead-letters/letter/", LetterView.as_view(), name="dead-letter"),
    path("dead-letters/letter/edit/", LetterEditView.as_view(), name="dead-letter-edit"),
    path("dead-letters/purge/", PurgeView.as_view(), name="purge"),
    path("dedup/", DedupLocksView.as_view(), name="dedup-locks"),
    path("dedup/release/", ReleaseView.as_view(), name="release"),
    path("leaders/", LeadersView.as_view(), name="leaders"),
    path("workers/", WorkersView.as_view(), name="workers"),
    path("audit/", AuditView.as_view(), name="audit"),
    path("assets/<str:name>", asset, name="asset"),
]
