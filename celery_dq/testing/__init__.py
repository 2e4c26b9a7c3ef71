"""Shipped for users and their tests: real servers that start at once, waiting with a deadline."""

from __future__ import annotations
