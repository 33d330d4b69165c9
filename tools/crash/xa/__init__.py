"""The campaign with two MariaDB servers: XA and last resource."""
