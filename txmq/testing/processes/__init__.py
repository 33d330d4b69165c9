"""Real servers as child processes: broker, MariaDB, Spark."""
