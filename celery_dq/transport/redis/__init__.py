"""The tenant broker on Redis."""

from __future__ import annotations
