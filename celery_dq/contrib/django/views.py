"""The view with the metrics for Prometheus: ``path("metrics", celery_dq.contrib.django.views.metrics)``.

The view asks for no permission. The project decides who may read it.
"""

from __future__ import annotations

from typing import cast

from django.apps import apps
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from celery_dq.contrib.django.apps import CeleryDQConfig


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with the metrics of the project's Celery app, within ``CELERY_DQ_METRICS_TIMEOUT``."""
    config = cast(CeleryDQConfig, apps.get_app_config(CeleryDQConfig.label))
    text = generate_latest(config.metrics_registry.get())
    return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)
