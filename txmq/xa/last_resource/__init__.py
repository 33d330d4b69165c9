"""The database decides: coordinator, resource, proof of an outcome."""
