"""Checkers that read a history and say which promise was broken."""
