"""Several brokers: what one of them knows of the cluster, and asks its registry."""
