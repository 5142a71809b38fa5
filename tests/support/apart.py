"""Calls in a process of their own, for libraries that change the one they are in: after jax every fork is a warning."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

CALL_S = 120.0


def apart(call: Callable[..., Any], *arguments: Any, needs: tuple[str, ...]) -> Any:
    """What *call*, a function of a module, returns; skips the test where one of the packages *needs* is missing."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result(CALL_S)
