"""``python -m tools.fuzz``: strangers at a broker's door, whose first bytes must cost nobody else anything."""
