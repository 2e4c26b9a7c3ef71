"""URLs of the project of the tests."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("dq/", include("celery_dq.contrib.django.urls"))]
