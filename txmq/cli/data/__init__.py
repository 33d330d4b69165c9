"""Commands that look into the data directory of a stopped broker."""
