"""XA on MySQL and MariaDB."""
