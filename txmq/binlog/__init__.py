"""Binlog sync: the committed row changes of a MariaDB or MySQL database as messages, and back into tables."""
