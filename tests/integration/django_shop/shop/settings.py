"""Settings of the small project; the tests set some of them by environment variables."""

from __future__ import annotations

import os

SECRET_KEY = "tests only"
INSTALLED_APPS = ["celery_dq.contrib.django", "orders"]
DATABASES: dict[str, dict[str, str]] = {}
USE_TZ = True

CELERY_BROKER_URL = os.environ["SHOP_BROKER"]
CELERY_TASK_DEFAULT_QUEUE = "push"
CELERY_DQ_ENVIRONMENT = "sandbox"
CELERY_DQ_QUEUES = {"push": {"rate": "50/s"}}
for name in os.environ.get("SHOP_SET", "").split():
    globals()[name.partition("=")[0]] = name.partition("=")[2]
