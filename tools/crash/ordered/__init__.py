"""The campaign of an ordered producer through outages, kills and full spools."""
