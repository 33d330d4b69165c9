"""Users, grants, quotas, and logins that failed."""
