"""Owners of topics and partitions. ``topics``: the topics of a broker that is alone (the embedded registry)."""
