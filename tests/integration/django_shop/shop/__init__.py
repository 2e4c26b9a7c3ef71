"""A Django project as Celery's guide lays it out, but for the import of the app: it is to be found."""
