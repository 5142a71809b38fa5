"""What is in checkpoints, what they cost, how they differ: everything behind `du`, `diff`, `inspect` and `estimate`.

Reads files and, beside a daemon or without one, a store's catalog; changes nothing. Presenting is the command line's.
"""
