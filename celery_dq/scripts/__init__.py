"""Lua scripts: loaded from files, joined with their includes, checked, run.

``loader``  ``ScriptSet`` loads a directory, resolves ``--@include``, reads the contract on top of each
            script, and runs it with ``EVALSHA`` (``EVAL`` once when the server does not know it)

A contract names the keys, the arguments and the reply of a script; ``tests/lua`` compares it with the code.
The transports, dedup, beat and leadership keep their scripts in their own packages and load them from here.
"""

from __future__ import annotations

from celery_dq.scripts.loader import Contract, Redis, Script, ScriptSet, is_noscript

__all__ = ["Contract", "Redis", "Script", "ScriptSet", "is_noscript"]
