"""Lua scripts: found, put together from their includes, checked against their contracts, run."""

from __future__ import annotations

from celery_dq.scripts.loader import Contract, Redis, Script, ScriptSet, is_noscript

__all__ = ["Contract", "Redis", "Script", "ScriptSet", "is_noscript"]
