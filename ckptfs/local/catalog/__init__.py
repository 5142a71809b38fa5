"""The catalog: SQLite, and the only SQL in ckptfs. One connection, owned by the event loop's thread."""
