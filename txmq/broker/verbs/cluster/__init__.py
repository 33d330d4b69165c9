"""Requests and events of a broker with a registry."""
