"""One live connection, the connection that reconnects, the session."""
