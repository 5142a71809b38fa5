"""Looking whether everything is still what it was, and mending it: `fsck` for what rows say, `scrub` for the bytes."""
