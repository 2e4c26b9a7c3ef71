"""One Django project for all tests of a process, because Django can be configured once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command

__all__ = ["configure"]


def _database(folder: Path) -> dict[str, Any]:
    """Return the settings of the database: a file of SQLite, or those of the variable DJANGO_DATABASE."""
    given = os.environ.get("DJANGO_DATABASE")
    if given is None:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "tests.sqlite3")}
    return dict(json.loads(given))


def configure(folder: Path) -> None:
    """Configure Django and migrate a database in a folder, unless another test has done so."""
    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="tests only",
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django_celery_beat",
            "celery_dq.contrib.django",
        ],
        DATABASES={"default": _database(folder)},
        USE_TZ=True,
        TIME_ZONE="UTC",
        # Numbers of forms, plots and scripts may be in no locale. "celery dq web" has Django's own settings.
        LANGUAGE_CODE="de",
        USE_THOUSAND_SEPARATOR=True,
        ROOT_URLCONF="tests.dashboard.urls",
        LOGIN_URL="/login/",
        ALLOWED_HOSTS=["testserver", "127.0.0.1"],
        # A quicker hash, for users that live as long as a test.
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.common.CommonMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        # Their tables are made at once, which is quicker than their migrations.
        MIGRATION_MODULES=dict.fromkeys(("auth", "contenttypes", "sessions", "django_celery_beat")),
        CELERY_DQ_APP="tests.dashboard.shop:app",
    )
    django.setup()
    call_command("migrate", verbosity=0, run_syncdb=True)
