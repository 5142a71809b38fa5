"""Between this disk and the remote: sealing, settling, publishing, following, hydrating. Runs on trio."""
