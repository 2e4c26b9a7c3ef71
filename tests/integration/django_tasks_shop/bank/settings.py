"""The settings. The environment gives the broker, and whether results are kept."""

from __future__ import annotations

import os

SECRET_KEY = "tests only"
INSTALLED_APPS = ["celery_dq.contrib.django", "payments"]
USE_TZ = True
TASKS = {
    "default": {
        "BACKEND": "celery_dq.contrib.django.tasks.DqBackend",
        "QUEUES": ["default", "reports"],
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": os.environ.get("BANK_ENGINE", "django.db.backends.sqlite3"),
        "NAME": os.environ.get("BANK_DATABASE", ":memory:"),
        "HOST": os.environ.get("BANK_HOST", ""),
        "USER": os.environ.get("BANK_USER", ""),
    }
}
CELERY_BROKER_URL = os.environ["BANK_BROKER"]
CELERY_TASK_DEFAULT_QUEUE = "push"
if results := os.environ.get("BANK_RESULTS"):
    CELERY_RESULT_BACKEND = results
    CELERY_RESULT_EXTENDED = os.environ.get("BANK_EXTENDED", "1") == "1"
    CELERY_TASK_TRACK_STARTED = True
