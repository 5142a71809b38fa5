"""`python -m ckptfs_mount`: the same as the command `ckptfs`."""

from .cli import main

if __name__ == "__main__":
    main()
