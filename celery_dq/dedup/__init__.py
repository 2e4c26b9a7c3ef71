"""Dedup: per key at most one call runs and at most one waits; the others are told who runs for them."""

from __future__ import annotations

from celery_dq.dedup.rule import Dedup as Dedup, dedup as dedup

__all__ = ["Dedup", "dedup"]
