"""Object stores behind one small Protocol: a directory and S3, and a wrapper that retries.

Blocking functions, safe to call from any thread. What the objects mean is `ckptfs.encoding`'s and `ckptfs.replica`'s
business.
"""
