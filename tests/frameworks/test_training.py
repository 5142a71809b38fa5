"""Real trainings, preempted on one machine and resumed on another that has only the remote."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import ckptfs
from tests.frameworks.conftest import MakeSite
from tests.frameworks.places import snapshot
from tests.support.mounts import Site, until
from tests.support.seaweed import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAMS = Path(__file__).parent / "programs"
PREEMPTED = 42


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


def start(program: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(PROGRAMS / program), *map(os.fspath, arguments)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """What it printed."""
    with process:
        try:
            out, err = process.communicate(timeout=180)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == status, out + err
    return out


def said(out: str, what: str) -> str:
    """The rest of the line that begins with *what*."""
    return next(line.removeprefix(what).strip() for line in out.splitlines() if line.startswith(what))


def mounted(site: Site, url: str) -> Site:
    site.mount("--remote", url, "--settle", "1s", "--lag", "200ms")
    return site


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        pytest.param("hf_trainer.py", ["checkpoint-10", "checkpoint-12"], marks=needs("transformers", "accelerate")),
        pytest.param(
            "lightning_trainer.py",
            ["epoch=0-step=10.ckpt", "epoch=0-step=12.ckpt", "last.ckpt"],
            marks=needs("lightning"),
        ),
    ],
)
def test_case_010_a_preempted_training_ends_as_on_a_plain_disk(
    machine: MakeSite, url: str, tmp_path: Path, program: str, kept: list[str]
) -> None:
    """Checkpoints are rotated on a mount; the machine dies; another resumes from the last one in its own mount, and
    ends with the weights and files that the same has on one plain disk."""
    here, there = mounted(machine("here"), url), machine("there")
    plain = start(program, tmp_path / "plain", "7")
    finish(start(program, here.mountpoint / "exp", "7"), PREEMPTED)
    finish(plain, PREEMPTED)
    plain = start(program, tmp_path / "plain", "99")
    assert ckptfs.wait(here.mountpoint, "replicated", 60)
    here.kill()
    mounted(there, url)
    out = finish(start(program, there.mountpoint / "exp", "99"))
    assert "6" in said(out, "resumes from")
    assert said(out, "weights") == said(finish(plain), "weights")
    names = sorted(os.listdir(there.mountpoint / "exp"))
    assert set(kept) <= set(names)
    if program == "hf_trainer.py":  # Lightning rotates what it saved below the same path only
        assert names == kept == sorted(os.listdir(tmp_path / "plain"))
    assert ckptfs.wait(there.mountpoint, "replicated", 60)
    here.mount()
    until(lambda: sorted(os.listdir(here.mountpoint / "exp")) == names, "the first machine to see it")
    assert snapshot(here.mountpoint, times=False) == snapshot(there.mountpoint, times=False)


@needs("torch")
def test_case_006_two_ranks_save_twice_into_one_directory(machine: MakeSite, url: str) -> None:
    """DCP replaces a checkpoint in place: one .metadata, no temporary, all shards whole, here and elsewhere."""
    here, there = mounted(machine("here"), url), machine("there")
    ranks(here.mountpoint / "dcp", "1", "2")
    names = sorted(os.listdir(here.mountpoint / "dcp"))
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert ranks(here.mountpoint / "dcp") == "loaded 2\n"
    assert ckptfs.wait(here.mountpoint, "replicated", 60)
    mounted(there, url)
    assert sorted(os.listdir(there.mountpoint / "dcp")) == names
    assert ranks(there.mountpoint / "dcp") == "loaded 2\n"


def ranks(directory: Path, *steps: str) -> str:
    """Run both ranks; what rank 0 printed."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    started = [start("dcp_saver.py", directory, rank, *steps, environment=environment) for rank in ("0", "1")]
    outs = [finish(process) for process in started]
    return outs[0]


@needs("orbax", "jax")
def test_case_035_orbax_saves_rotates_and_restores_elsewhere(machine: MakeSite, url: str) -> None:
    """Orbax's temporary directories, commits and locks work; two of four steps are kept, and restored elsewhere."""
    here, there = mounted(machine("here"), url), machine("there")
    finish(start("orbax_saver.py", here.mountpoint / "orbax", "1", "2", "3", "4"))
    assert sorted(os.listdir(here.mountpoint / "orbax")) == ["3", "4"]
    assert ckptfs.wait(here.mountpoint, "replicated", 60)
    mounted(there, url)
    assert finish(start("orbax_saver.py", there.mountpoint / "orbax")) == "loaded 4 [3, 4]\n"
