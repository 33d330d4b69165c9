"""The campaign of transactions over homes: each crash point of both brokers and of the client, and pairs of victims."""
