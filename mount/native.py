"""Loads the C module `_passthrough`, where it was built, before anything of this package imports pyfuse3.

It defines a function of libfuse's that pyfuse3 calls. The dynamic linker takes the first one that it finds, so ours
must be visible to all (RTLD_GLOBAL) by the time pyfuse3 is loaded: the package imports this module first.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def _load() -> tuple[Any, str]:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        return importlib.import_module("._passthrough", __package__), ""
    except ImportError as error:
        return None, str(error)
    finally:
        sys.setdlopenflags(flags)


library, missing = _load()
"""The module, or None and why."""
