"""The campaign of a Spark stream whose driver and broker die."""
