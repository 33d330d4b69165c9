"""The rows, by what they measure. ``ROWS`` in ``bench.catalogue`` lists them all."""
