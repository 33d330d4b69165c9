"""``make crash``: real processes, killed with SIGKILL at chosen points; the promises are checked on what is left."""
