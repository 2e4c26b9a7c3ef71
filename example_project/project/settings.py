"""Settings of the shop.

The runner starts the same project twice, once per broker, and configures it by environment variables:

``SHOP_BROKER_URL``
    ``dq-redis://...`` (celery-dq) or ``redis://...`` (the transport that comes with Celery).
``SHOP_DATABASE``
    Path of the SQLite file.
"""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "an example is not a secret"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["shop"]
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", str(BASE_DIR / "db.sqlite3")),
        "CONN_MAX_AGE": None,
        # With a write-ahead log, readers do not wait for the writers: two workers and the shop.
        "OPTIONS": {"timeout": 20, "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"},
    }
}

# --- Celery, the same on every broker ---------------------------------------------------------------------

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER_URL", "dq-redis://127.0.0.1:6379/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_DEFAULT_QUEUE = "push"
CELERY_TASK_ROUTES = {"shop.ledger.post": "ledger"}
CELERY_WORKER_PREFETCH_MULTIPLIER = (
    1  # as Celery's guide recommends for late acknowledgement and mixed run times
)
CELERY_WORKER_HIJACK_ROOT_LOGGER = True

# --- celery-dq --------------------------------------------------------------------------------------------

ON_DQ = CELERY_BROKER_URL.startswith("dq-")

if ON_DQ:
    INSTALLED_APPS += ["celery_dq.contrib.django"]
    # Each merchant is a tenant of the queue "push". This quota is for merchants without their own quota, that
    # is, the thousands of quiet ones. `manage.py replay_day` sets the quotas of the loud ones.
    CELERY_DQ_QUEUES = {"push": {"rate": "50/s", "burst": 20, "concurrency": 4}}
    # Messages of a dead worker return to their places after this many seconds.
    CELERY_DQ_LEASE = 5
    # One worker at a time posts to the ledger, in order. The broker or a ZooKeeper holds the election.
    CELERY_DQ_SINGLETON_QUEUES = [] if os.environ.get("SHOP_PLAIN") else ["ledger"]
    CELERY_DQ_ELECTION = os.environ.get("SHOP_ELECTION", "")
    CELERY_DQ_ELECTION_SESSION = float(os.environ.get("SHOP_ELECTION_SESSION", "10"))
