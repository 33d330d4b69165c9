"""The broker decides: XA coordinator, branches, their resolver and verdict."""
