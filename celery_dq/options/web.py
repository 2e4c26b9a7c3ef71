"""The settings of the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dq.options.schema import Kind, Setting

__all__ = ["WEB_SETTINGS", "WebOptions", "web_options"]

WEB_SETTINGS = (
    Setting(
        "dq_web_read_only",
        Kind.FLAG,
        False,
        "Whether the dashboard refuses every change, whatever the permissions of its user.",
    ),
    Setting(
        "dq_web_show_arguments",
        Kind.FLAG,
        False,
        "Whether the dashboard shows arguments and unknown headers to users with 'view_arguments'.",
    ),
)


@dataclass(frozen=True)
class WebOptions:
    """Options of the dashboard.

    Attributes:
        read_only: ``dq_web_read_only``, whether every change is refused; default False.
        show_arguments: ``dq_web_show_arguments``, whether arguments are shown at all; default False.
    """

    read_only: bool = False
    show_arguments: bool = False


def web_options(values: Mapping[str, Any]) -> WebOptions:
    """Make the options from checked `values`."""
    return WebOptions(values["dq_web_read_only"], values["dq_web_show_arguments"])
