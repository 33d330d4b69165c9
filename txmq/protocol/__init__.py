"""The wire protocol, sans-I/O: bytes to request tuples, answers to bytes, and back again on the client's side."""
