"""The relay of an outbox in this process: carries out the steps of ``txmq/outbox/relay_core.py``.

``database_side.py`` does what the core asks of the database, ``broker_side.py`` what it asks of the brokers,
``relay.py`` is the thread.
"""
