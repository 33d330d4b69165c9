"""What every SQL database needs: DB-API, dialects, marker table, installation, guarded and pooled connections."""
