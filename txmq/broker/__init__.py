"""The broker: a deterministic core (``core``, ``state``, ``transactions``, ...), a store over one data directory, and
the sockets around them (``server``, ``process``)."""
