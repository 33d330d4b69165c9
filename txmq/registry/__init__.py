"""Who owns what. ``topics``: the topics of a broker that is alone (the embedded registry)."""
