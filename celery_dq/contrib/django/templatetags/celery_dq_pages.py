"""Addresses, numbers and times, as the dashboard's templates show them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from django import template

from celery_dq.contrib.django.dashboard.forms import exact
from celery_dq.contrib.django.dashboard.history import plots
from celery_dq.contrib.django.dashboard.links import asset_address, link_to
from celery_dq.inspector.claim_rates import spelled_share, spelled_speed
from celery_dq.options import Quota
from celery_dq.options.quota import WHEN_FULL, WhenFull

register = template.Library()
register.simple_tag(asset_address)
register.simple_tag(plots)
register.filter("plain_number", exact)

#: A time with its zone, as sentences of the API and the command line have it.
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{3}(?:\d{3})?)?[+-]\d\d:\d\d")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


@register.simple_tag
def link(view: str, **query: Any) -> str:
    """Return the address of a page; a parameter that is None or "" is left out, except the tenant."""
    return link_to(
        view, **{name: value for name, value in query.items() if value or (name == "tenant" and value == "")}
    )


@register.filter
def seconds(value: float | None) -> str:
    """Return a time span in its two largest units."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "over 1 h"
    if value < 0.0995:
        return f"{value * 1000:.0f}\u202fms"
    if value < 10:
        return f"{value:.1f}\u202fs"
    if value < 60:
        return f"{value:.0f}\u202fs"
    for position, (size, unit) in enumerate(_UNITS):
        if value >= size:
            whole, rest = divmod(int(value), size)
            smaller, name = (*_UNITS, (1, "s"))[position + 1]
            text = f"{whole}\u202f{unit}"
            return f"{text} {rest // smaller}\u202f{name}" if rest // smaller else text
    return ""


@register.filter
def count(value: Any) -> str:
    """Return a number with thin spaces between thousands; a dash for None."""
    return "–" if value is None else f"{value:,}".replace(",", "\u202f")


@register.filter
def clock(value: datetime | None) -> str:
    """Return a time in UTC; a dash for None."""
    return "–" if value is None else value.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@register.filter
def times(sentence: object) -> str:
    """Return a sentence with its times in the form of the other ones."""
    return _TIME.sub(lambda found: clock(datetime.fromisoformat(found[0])), str(sentence))


@register.filter
def rate(value: float | None) -> str:
    """Return a rate as it is written in a quota."""
    if value is None:
        return "unlimited"
    text = Quota(rate=value).spelled_rate
    return text if isinstance(text, str) else f"{exact(value)}/s"


@register.simple_tag
def when_full_choices() -> tuple[WhenFull, ...]:
    """Return what a quota may do with calls of a tenant at its ``max_waiting``."""
    return WHEN_FULL


@register.filter
def bound(value: float | None) -> str:
    """Return the upper bound of a waiting time."""
    over = value is None or not math.isfinite(value)
    return "over 1 h" if over else f"≤\u202f{seconds(value).replace('.0', '')}"


@register.filter
def plotted(value: float | None, unit: str) -> str:
    """Return a value of a plot: a ``rate`` per second, a ``wait`` in seconds, or a ``count``."""
    if value is None:
        return "–"
    if unit == "wait":
        return seconds(value).replace(".0", "")
    if unit == "rate":
        return f"{value:,.0f}/s" if value >= 10 or value == int(value) else f"{value:.2g}/s"
    return count(int(value)) if value == int(value) else f"{value:g}"


@register.filter
def measured(per_s: float | None) -> str:
    """Return a measured rate, in the unit that shows it best; a dash for None."""
    return spelled_speed(per_s).replace("-", "–")


@register.filter
def percent(part: float | None) -> str:
    """Return a part of 1 in percent; a dash for None."""
    return spelled_share(part).replace("-", "–")


@register.filter
def name(value: str) -> str:
    """Return the name of a tenant; a word instead of the empty one."""
    return value or "(none)"


@register.inclusion_tag("celery_dq/shares.html")
def shares(queue: Any) -> dict[str, Sequence[tuple[str, str, int, float, float]]]:
    """Draw the tenants of a queue by the reason for which they wait, as a bar of 100 units."""
    counts = (
        ("servable", "servable", queue.eligible),
        ("throttled", "throttled", queue.throttled),
        ("at-concurrency", "at concurrency", queue.at_concurrency),
        ("paused", "paused", queue.paused),
    )
    total = sum(number for _, _, number in counts)
    start, parts = 0.0, []
    for style, label, number in counts:
        if number:
            # A part that exists is visible.
            width = max(100 * number / total, 2.0)
            parts.append((style, label, number, start, width))
            start += width
    return {"parts": [(a, b, c, 100 * d / start, 100 * e / start) for a, b, c, d, e in parts]}
