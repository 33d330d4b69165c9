"""The verb ``group``: joining, saving offsets, handing partitions over, operators' changes."""
