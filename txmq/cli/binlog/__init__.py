"""``txmq binlog``: one file for each command."""
