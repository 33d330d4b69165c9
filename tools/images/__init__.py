"""Crash images: scripts on a recording disk, cut at every operation, recovered and checked."""
