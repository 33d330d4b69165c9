"""The only doors to the outside: clock, files, random numbers, network. Import from the submodules."""
