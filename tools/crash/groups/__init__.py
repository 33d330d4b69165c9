"""The campaign of a consumer group whose members join, leave, pause and die."""
