"""Processes that save and load at the same moment, as the ranks of a training run do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

from .workloads import Workload

_ANSWER_S = 1800.0
"""Longest that a save or a load may take."""


class Crew:
    """Processes that hold a checkpoint each. Use as a context manager.

    They are spawned, as trainers are that use CUDA, and stay until the block ends: starting is never timed.
    """

    def __init__(self, count: int, build: Callable[[int], Workload], size_bytes: int) -> None:
        """Every process holds `build(size_bytes)`; *build* is a class or a function of a module."""
        self._count = count
        self._build = build
        self._size_bytes = size_bytes
        self._context = multiprocessing.get_context("spawn")
        self._barrier = self._context.Barrier(count)  # kept: its semaphores go with this object
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Crew:
        # One thread each when there are many: as launchers of training runs set it.
        threads = max(1, (os.cpu_count() or 1) // self._count)
        for _ in range(self._count):
            near, far = self._context.Pipe()
            arguments = (far, self._barrier, self._build, self._size_bytes, threads)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            far.close()  # so that a process that died is noticed
            self._processes.append(process)
            self._pipes.append(near)
        self.change()  # returns when all of them are ready
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10)

    def change(self) -> None:
        """Give every checkpoint other content."""
        self._together("change", [Path()] * self._count)

    def save(self, paths: list[Path], *, fsync: bool = False) -> float:
        """Each saves at its own path; seconds from the first begin to the last end."""
        return self._together("save and fsync" if fsync else "save", paths)

    def load(self, paths: list[Path]) -> float:
        """As `save`; what each loaded is compared with what it saved, after the clock was stopped."""
        return self._together("load", paths)

    def _together(self, operation: str, paths: list[Path]) -> float:
        for pipe, path in zip(self._pipes, paths, strict=True):
            pipe.send((operation, path))
        answers: list[tuple[float, float]] = []
        for pipe, path in zip(self._pipes, paths, strict=True):
            if not pipe.poll(_ANSWER_S):
                raise TimeoutError(f"{operation} {path}: no answer after {_ANSWER_S:.0f} s")
            answer = pipe.recv()  # EOFError when the process died, having said why
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return max(end for _, end in answers) - min(begin for begin, _ in answers)  # one clock for all of Linux


def _serve(pipe: Connection, barrier: Barrier, build: Callable[[int], Workload], size_bytes: int, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch, which nobody has imported yet
    workload = build(size_bytes)
    while True:
        operation, path = pipe.recv()
        barrier.wait(_ANSWER_S)
        try:
            pipe.send(_perform(workload, operation, path))
        except Exception as error:
            pipe.send(error)


def _perform(workload: Workload, operation: str, path: Path) -> tuple[float, float]:
    """Begin and end."""
    begin = time.perf_counter()
    if operation == "change":
        workload.change()
    elif operation == "load":
        loaded = workload.load(path)
        end = time.perf_counter()
        if not workload.matches(loaded):
            raise ValueError(f"{path} was read with other content than it was saved with")
        del loaded
        gc.collect()  # torch's loaded state is cyclic; its memory is wanted for the next load
        return begin, end
    else:
        workload.save(path)
        if operation == "save and fsync":
            fsync(path)
    return begin, time.perf_counter()


def fsync(path: Path) -> None:
    """Of a file, or of everything below a directory."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
