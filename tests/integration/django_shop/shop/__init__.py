"""A Django project in the layout of Celery's guide, but without the import of the app."""
