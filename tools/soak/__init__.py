"""``python -m tools.soak``: endless mixed load against a real broker, whose resources must stay within bounds."""
