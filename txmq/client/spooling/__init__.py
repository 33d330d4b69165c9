"""Producers that keep on local disk what they cannot send: ordered, and retrying."""
