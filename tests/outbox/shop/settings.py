"""The settings of the project. The environment gives the databases, the broker, and further settings."""

from __future__ import annotations

import json
import os

DATABASES = json.loads(os.environ["SHOP_DATABASES"])
if any(each["ENGINE"].endswith("mysql") for each in DATABASES.values()):
    import pymysql

    pymysql.install_as_MySQLdb()

SECRET_KEY = "tests only"
INSTALLED_APPS = ["celery_dq.contrib.django", "tests.outbox.shop"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CELERY_DQ_APP = "tests.outbox.shop.celery:app"
CELERY_DQ_OUTBOX = "default"
CELERY_BROKER_URL = os.environ["SHOP_BROKER"]
CELERY_TASK_DEFAULT_QUEUE = "push"
globals().update(
    {f"CELERY_{name}".upper(): value for name, value in json.loads(os.environ["SHOP_SET"]).items()}
)
