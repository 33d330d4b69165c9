"""Binlog changes into topics: which topic and partition, in which transaction, and with which position."""
