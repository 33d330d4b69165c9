"""The path of a commit group, from its seal to the partition files."""
