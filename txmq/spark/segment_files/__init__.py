"""The source that reads a data directory without a broker."""
