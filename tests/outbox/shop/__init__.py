"""A Django project with an outbox; the tests run its programs in processes of their own."""
