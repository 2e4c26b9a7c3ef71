"""URLs of the shop."""

from __future__ import annotations

from django.urls import path

from shop.views import overview

urlpatterns = [path("", overview)]
