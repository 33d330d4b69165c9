"""An order service with Django under ATOMIC_REQUESTS: messages by the outbox, in the request's transaction.

::

    pip install '.[django,postgres]'
    export DJANGO_SETTINGS_MODULE=examples.order_service_django.settings
    export ORDERS_DB='{"HOST": "127.0.0.1", "NAME": "shop", "USER": "shop", "PASSWORD": "..."}'
    txmq broker &
    txmq topic create orders --partitions 4
    python -m django migrate --run-syncdb
    python -m django txmq_relay &
    python -m django runserver --noreload &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -d '{"customer": "ada", "articles": ["tea", "cup"]}'

A request needs no broker. The relay, a process of its own, takes what was committed to the broker.
docs/how-to/django.md makes a project of your own.
"""
