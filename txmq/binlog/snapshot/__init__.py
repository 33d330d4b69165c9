"""Rows that a database has already: read by chunks, at known positions of its binlog, between which the stream goes on.

Why it is made so. One consistent read of the whole database is exact, but it ends with its connection, and holds back
the server's purge for as long as it takes. A read in chunks between two watermarks (DBLog, Debezium) can be taken up
again, but shows changes of rows before the rows themselves. This snapshot takes many short consistent reads
(``consistent_read``): MariaDB tells the exact position of each, without a lock. The reader publishes the binlog up to
that position, then the chunks of the view, then the binlog again. What lies in the binlog between two views is exact as
well, because a change of a row that no chunk had yet is passed over (``publish/unread.py``). So it does not matter how
often it is cut off.
"""
