"""The broker: a deterministic core (``core``, ``state``, ``verbs``), the pipeline over one data directory
(``commit``), and the sockets around them (``shell``)."""
