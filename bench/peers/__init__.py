"""Other brokers, started by the benchmark itself where they are installed, each in a directory of its own."""
