"""A model of the outbox, in which the relays run the core that ships. See ``world``."""
