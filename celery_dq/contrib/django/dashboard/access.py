"""The rights to see and change things, checked in the server for each request."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

VIEW_QUEUES = "view_queues"
VIEW_ARGUMENTS = "view_arguments"
#: The permissions of the app ``celery_dq``, with Django's description.
PERMISSIONS = (
    (VIEW_QUEUES, "Can view queues, tenants, messages, dead letters, dedup locks and leaders"),
    (VIEW_ARGUMENTS, "Can view the arguments of tasks, if dq_web_show_arguments is set"),
    ("change_quotas", "Can change the quotas of tenants"),
    ("pause_tenants", "Can pause and resume tenants"),
    ("pause_queues", "Can pause and resume whole queues"),
    ("cancel_messages", "Can cancel tasks"),
    ("edit_messages", "Can reschedule, reprioritise, edit and move tasks"),
    ("replay_dead_letters", "Can send dead letters again"),
    ("edit_dead_letters", "Can change dead letters and send them again"),
    ("purge_dead_letters", "Can delete dead letters"),
    ("release_dedup_locks", "Can release dedup locks"),
)


def may(request: HttpRequest, permission: str) -> bool:
    """Whether the user of a request has a permission of this app.

    Raises:
        ImproperlyConfigured: The project has no users.
    """
    user: Any = getattr(request, "user", None)
    if user is None:
        raise ImproperlyConfigured(
            "the dashboard of celery-dq needs users: add 'django.contrib.auth' to INSTALLED_APPS and its "
            "AuthenticationMiddleware to MIDDLEWARE, or run 'celery dq web', which needs neither"
        )
    return bool(user.has_perm(f"celery_dq.{permission}"))
