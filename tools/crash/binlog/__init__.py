"""The campaign of a binlog sync: a load, its reader and applier, broker and both databases, killed."""
