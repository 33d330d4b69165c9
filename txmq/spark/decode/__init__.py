"""Record batches to Arrow columns, without a loop over records."""
