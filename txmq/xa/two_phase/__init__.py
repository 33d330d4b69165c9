"""The broker decides: XA coordinator, branches, their resolver, heuristic outcomes."""
