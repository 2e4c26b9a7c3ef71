"""Dedup: per key at most one call runs and at most one waits; the others are told who runs for them."""
