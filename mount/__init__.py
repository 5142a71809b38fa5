"""What people run: the FUSE adapter, the daemon, its control socket and the `ckptfs` command.

Everything a file operation means, and everything that is kept or sent, is in the library `ckptfs`.
"""

from . import native as native  # before pyfuse3
