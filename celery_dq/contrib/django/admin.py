"""A link to the dashboard on the index of Django's admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch

from celery_dq.contrib.django.dashboard.access import VIEW_QUEUES, may
from celery_dq.contrib.django.dashboard.links import link_to
from celery_dq.contrib.django.models import Dashboard


def _is_shown(request: HttpRequest) -> bool:
    """Whether the project has the pages of the dashboard, and the user may look at them."""
    try:
        link_to("queues")
    except NoReverseMatch:
        return False
    return may(request, VIEW_QUEUES)


@admin.register(Dashboard)
class DashboardAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic for type checkers only
    """Shows no list of objects: its address leads to the dashboard."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether the user sees the link."""
        return _is_shown(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nothing can be added."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nothing is changed in the admin."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nothing can be deleted."""
        return False

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whether the user sees the section."""
        return _is_shown(request)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Lead to the dashboard."""
        if not _is_shown(request):
            raise PermissionDenied
        return HttpResponseRedirect(link_to("queues"))
