"""Public test kit: real broker processes, and what goes with them. Import from the submodules."""
