"""This machine's disk: the store of one mount, and what is asked of the file system below it."""
