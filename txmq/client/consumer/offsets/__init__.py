"""Offset stores: the broker's, a file's, MySQL's, ZooKeeper's."""
