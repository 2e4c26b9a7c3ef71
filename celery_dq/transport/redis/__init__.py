"""The tenant broker on Redis: ``dq-redis://``, ``dq-rediss://``, ``dq-sentinel://``."""
