"""``celery dq migrate``: from kombu's Redis transport to the tenant broker."""
