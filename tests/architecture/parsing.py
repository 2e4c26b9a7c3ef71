"""The syntax tree of a source text, parsed once for all architecture tests."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parse(source: str) -> ast.Module:
    """Return the tree of `source`; the tests share it and must not change it."""
    return ast.parse(source)
