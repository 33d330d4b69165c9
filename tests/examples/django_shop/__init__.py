"""A Django project around ``examples/django_orders.py``; its cases are run by tests/examples/test_django.py."""
