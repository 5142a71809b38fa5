"""The work that can be asked for, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptfs.background.hashing import hash_images
from ckptfs.background.packing import build_pack

TASKS: Mapping[str, Callable[..., Any]] = {each.__name__: each for each in (hash_images, build_pack)}
