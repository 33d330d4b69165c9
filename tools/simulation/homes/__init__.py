"""Histories of several brokers that share a registry: see ``run``."""
