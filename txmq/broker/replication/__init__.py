"""Copies of a home: what a replica does with the journal that its leader sends."""
