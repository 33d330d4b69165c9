"""The redo journal: record format, append and group commit, scan and recovery, checkpoints, what records hold."""
