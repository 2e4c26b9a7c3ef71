"""The look-up of a Django project's Celery app."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery.utils.imports import symbol_by_name
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from celery_dq.compat.celery_calls import current_app_if_any

#: Optional setting with the path of the app, such as ``"shop.celery:app"``.
APP_SETTING = "CELERY_DQ_APP"
#: The setting in which ``celery dq web`` keeps its app, which may be another one than the project's.
SERVED_APP = "DQ_WEB_APP"


def project_app() -> Any:
    """Return the Celery app of the project.

    The first of these is used: the app that ``celery dq web`` serves; the app that ``CELERY_DQ_APP`` names;
    the current app, which the project's ``__init__`` imports in the usual layout; ``app`` in the module
    ``celery`` beside the settings module.

    Raises:
        ImproperlyConfigured: There is no app, or the setting names another object.
    """
    served = getattr(settings, SERVED_APP, None)
    if served is not None:
        return served
    named = getattr(settings, APP_SETTING, None)
    if named:
        return _imported(str(named))
    # `celery.current_app` would create an app if there is none.
    app = current_app_if_any()
    if app is not None:
        return app
    package = (settings.SETTINGS_MODULE or "").rpartition(".")[0]
    if package:
        return _imported(f"{package}.celery:app")
    raise ImproperlyConfigured(
        f"celery_dq.contrib.django found no Celery app; set {APP_SETTING} = 'shop.celery:app', or import the"
        " app in the project's __init__.py as Celery's guide for Django shows"
    )


def _imported(path: str) -> Any:
    try:
        module, _, attribute = path.partition(":")
        import_module(module)
        app = symbol_by_name(f"{module}:{attribute or 'app'}")
    except (ImportError, AttributeError, ValueError) as exc:
        raise ImproperlyConfigured(
            f"celery_dq.contrib.django cannot import the Celery app {path!r} ({exc});"
            f" set {APP_SETTING} to 'module:attribute'"
        ) from exc
    if not hasattr(app, "send_task"):
        raise ImproperlyConfigured(f"{APP_SETTING} = {path!r} is a {type(app).__name__}, not a Celery app")
    return app
