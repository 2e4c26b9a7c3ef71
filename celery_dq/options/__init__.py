"""Checked settings: one table, one way to read it, frozen objects as the result.

``schema``     the kinds of value, and how a wrong one is refused
``quota``      what a tenant may take
``buffer``, ``publishing``, ``singleton``, ``web``   the settings of these areas
``sections``   the table of all settings, and the frozen objects made from them
``resolve``    from the configuration of an app to ``Options``

Every package receives ``Options`` from ``celery_dq.wiring``; none reads the configuration itself.
"""

from __future__ import annotations

from celery_dq.options.quota import Quota
from celery_dq.options.resolve import resolve
from celery_dq.options.sections import Options, QueueOptions

__all__ = ["Options", "QueueOptions", "Quota", "resolve"]
