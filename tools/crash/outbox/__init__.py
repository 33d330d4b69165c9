"""The campaign of outboxes: services on three databases, two relays, an operator."""
