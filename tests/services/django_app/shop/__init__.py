"""A Django project with ``txmq.django``, two databases and ATOMIC_REQUESTS, for the tests beside it."""
