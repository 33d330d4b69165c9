"""A Django project around ``examples/django_last_resource.py``; its cases are run by tests/examples/test_django.py."""
