"""The campaign of the outbox: orders are taken while the broker is away, slow, unreachable or restored."""
