"""Group H: what data loaders fork reads a mount while the training saves to it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import ckptfs
from tests.support.mounts import Site, run

LOADER_S = 90

LOADER = """
import os, sys, threading
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

top, rounds = sys.argv[1], int(sys.argv[2])
FILES, RECORDS = 16, 32

def record(number):
    return np.random.default_rng(number).integers(0, 1 << 31, 4096)

class Records(Dataset):
    def __len__(self):
        return FILES * RECORDS

    def __getitem__(self, number):
        file, at = divmod(number, RECORDS)
        return number, torch.from_numpy(np.load(f"{top}/data/{file}.npy", mmap_mode="r")[at].copy())

os.mkdir(f"{top}/data")
for file in range(FILES):
    np.save(f"{top}/data/{file}.npy", np.stack([record(file * RECORDS + at) for at in range(RECORDS)]))

done, failures, saved = threading.Event(), [], 0

def save():
    global saved
    try:
        while not done.is_set():
            torch.save({"weight": torch.full((500_000,), saved), "step": saved}, f"{top}/checkpoint.part")
            os.replace(f"{top}/checkpoint.part", f"{top}/checkpoint-{saved % 3}.pt")
            saved += 1
    except BaseException as error:
        failures.append(error)

saver = threading.Thread(target=save)
saver.start()
try:
    for _ in range(rounds):
        loader = DataLoader(Records(), 8, shuffle=True, num_workers=3, timeout=30, multiprocessing_context="fork")
        seen = set()
        for numbers, rows in loader:
            for number, row in zip(numbers.tolist(), rows):
                assert np.array_equal(row.numpy(), record(number)), number
                seen.add(number)
        assert seen == set(range(FILES * RECORDS))
finally:
    done.set()
    saver.join()
assert not failures and saved >= rounds, (failures, saved)
last = torch.load(f"{top}/checkpoint-{(saved - 1) % 3}.pt")
assert last["step"] == saved - 1 and bool((last["weight"] == saved - 1).all())
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_case_062_forked_workers_read_while_the_training_saves(site: Site) -> None:
    """Each round a loader forks three workers beside a thread that saves: nobody hangs, every record is what it was."""
    done = run([sys.executable, "-c", LOADER, str(site.mountpoint), "4"], timeout_s=LOADER_S)
    assert done.status == 0, done.said
    assert ckptfs.wait(site.mountpoint, "sealed", 30)
    site.umount()
    assert "Traceback" not in site.log(), site.log()
