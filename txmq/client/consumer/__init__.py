"""Consumers: membership, assignment, fetching, delivery, acknowledgements."""
