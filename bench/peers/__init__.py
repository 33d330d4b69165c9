"""Other brokers, started by the benchmark itself if they are installed, each in a directory of its own."""
