"""The broker: a deterministic core (``core``, ``state``, ``verbs``), the ``commit`` pipeline over one data directory, and
the sockets around them (``shell``)."""
