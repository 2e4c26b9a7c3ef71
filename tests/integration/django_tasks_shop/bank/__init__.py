"""A Django project whose tasks are Django's; tests/integration/test_django_tasks.py runs it."""
