"""For every SQL database: DB-API, dialects, marker table, installation, guarded and pooled connections."""
