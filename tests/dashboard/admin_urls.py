"""URLs of a project with Django's admin."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("dq/", include("celery_dq.contrib.django.urls"))]
