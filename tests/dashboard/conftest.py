"""A Django project with the dashboard, on a real Redis, without a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.errors import ConfigurationError
from tests.dashboard import shop as shop_module
from tests.dashboard.shop import make_app
from tests.django_project import configure

Login = Callable[..., Any]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> None:
    configure(tmp_path_factory.mktemp("django"))


@pytest.fixture(autouse=True)
def patient_pages(monkeypatch: pytest.MonkeyPatch, project: None) -> None:
    """Let pages wait for the broker as long as a busy machine needs; tests of the deadline set another."""
    from celery_dq.contrib.django.dashboard import broker_reads

    monkeypatch.setattr(broker_reads, "DEADLINE_S", 60.0)


@pytest.fixture
def use_app(monkeypatch: pytest.MonkeyPatch, project: None) -> Iterator[Callable[..., Any]]:
    """A function that makes the app of the dashboard, with its broker and its settings."""
    from django.apps import apps

    from celery_dq.contrib.django.dashboard.broker_reads import BrokerReads
    from celery_dq.contrib.django.dashboard.history import Sampler
    from celery_dq.per_process import PerProcess

    made: list[Any] = []
    config: Any = apps.get_app_config("celery_dq")
    monkeypatch.setattr(config, "reads", PerProcess(BrokerReads))
    monkeypatch.setattr(config, "sampler", PerProcess(Sampler))

    def use_app(broker_url: str, **settings: Any) -> Any:
        app = make_app(broker_url, **settings)
        made.append(app)
        monkeypatch.setattr(shop_module, "app", app)
        return app

    yield use_app
    config.sampler.get().stop()
    for app in made:
        with contextlib.suppress(ConfigurationError):  # the test that has a wrong setting
            app.pool.force_close_all()
        app.close()


@pytest.fixture
def shop(use_app: Callable[..., Any], redis_url: str) -> Any:
    return use_app(redis_url.replace("redis://", "dq-redis://", 1))


@pytest.fixture
def login(project: None) -> Iterator[Login]:
    """A function that returns a client whose user has permissions; "all" stands for all of them."""
    from django.contrib.auth.models import Permission, User
    from django.db import connections
    from django.test import Client

    users: list[User] = []

    def login(*permissions: str, csrf: bool = False) -> Any:
        user = User.objects.create_user(f"user-{len(users)}")
        users.append(user)
        own = Permission.objects.filter(content_type__app_label="celery_dq")
        user.user_permissions.set(own if permissions == ("all",) else own.filter(codename__in=permissions))
        client = Client(enforce_csrf_checks=csrf)
        client.force_login(user)
        return client

    yield login
    for user in users:
        user.delete()
    connections.close_all()


@pytest.fixture
def operator(login: Login) -> Any:
    return login("all")
