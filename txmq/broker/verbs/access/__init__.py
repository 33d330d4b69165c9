"""Users, what they may do, and quotas: the verbs ``user``, ``acl`` and ``quota``."""
