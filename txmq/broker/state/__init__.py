"""The broker's memory: the fold over the journal, and (in memory only) members, reports and deadlines."""
