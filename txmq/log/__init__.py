"""The ordered, partitioned log: record batches, segments, indexes, partitions."""
