"""Living in a Celery worker: boot steps, and what a task's life means for its message."""
