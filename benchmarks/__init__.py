"""Benchmarks of celery-dq beside Celery's own transports, in one run. ``python -m benchmarks --help``."""
