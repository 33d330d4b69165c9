"""What operators call: consumer groups, deferred messages, transactions."""
