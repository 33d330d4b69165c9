"""Change events back into the tables of a second database, and the comparison of both."""
