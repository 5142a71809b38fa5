"""The command line's own work: numbers for people, one-line errors, progress, and where stores lie."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ckptfs.client import Place
from ckptfs.errors import CkptfsError, StoreError
from ckptfs_mount import placement
from ckptfs_mount.cli import main, output
from ckptfs_mount.cli.seeing import _at_risk, _show
from ckptfs_mount.cli.unmounting import _tell_end
from ckptfs_mount.cli.waiting import Waiting, interruptible
from ckptfs_mount.order import EXIT_PENDING, Order, PipeReporter


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), ("500ms", 0.5), (" 30 s", 30.0), ("1.5m", 90.0), ("2h", 7200.0), ("1d", 86400.0), (".5", 0.5)],
)
def test_durations_are_read_with_their_units(text: object, seconds: float) -> None:
    """Seconds by default, with ms, s, m, h or d."""
    assert output.DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1x", "1 2", "nan", "1e3"])
def test_what_is_no_duration_is_wrong_usage(text: str) -> None:
    """Anything else is refused by name."""
    with pytest.raises(click.BadParameter, match="is no duration"):
        output.DURATION.convert(text, None, None)


def test_numbers_are_written_for_people() -> None:
    """Sizes in powers of 1024, durations rounded, unknown as a question mark."""
    assert [output.size(each) for each in (0, 1023, 1536, 5 << 30, 3 << 40, 2 << 50, None)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3.0 TiB", "2.0 PiB", "?",
    ]  # fmt: skip
    assert [output.duration(each) for each in (0, 59.6, 600, 7200, 1e6, None)] == [
        "1 s", "60 s", "10 min", "2.0 h", "12 days", "?",
    ]  # fmt: skip
    assert output.ago(None) == "never"
    assert output.ago(time.time() - 600) == "10 min ago"
    assert [output.files(each) for each in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def report(**fields: object) -> dict[str, object]:
    return {"pending_bytes": 0, "pending_files": 0, "sent_bytes": 0, "rate_bytes_s": 0.0, "eta_s": None,
            "last_error": None, **fields}  # fmt: skip


def test_progress_elsewhere_than_on_a_terminal_is_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file gets a line every few seconds, not a moving bar; nothing when nothing is pending."""
    with Waiting("uploading") as waiting:
        waiting.show(report())
        for left in range(10, 0, -1):
            waiting.show(report(pending_bytes=left << 20, pending_files=left, rate_bytes_s=1 << 20, eta_s=left))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["uploading: 10 files, 10.0 MiB, 1.0 MiB/s, about 10 s"]


def test_an_outage_does_not_fill_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes of the same error are a line a minute; what changes is told within seconds."""
    clock = [1000.0]
    monkeypatch.setattr("ckptfs_mount.cli.waiting.time.monotonic", lambda: clock[0])
    with Waiting("waiting") as waiting:
        for _ in range(1200):
            waiting.show(report(pending_files=2, pending_bytes=1 << 20, eta_s=clock[0], last_error="no answer"))
            clock[0] += 0.5
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 10
        assert lines[0] == "waiting: 2 files, 1.0 MiB, about 17 min; last error: no answer"
        waiting.show(report(pending_files=1, pending_bytes=1 << 20))
        assert capsys.readouterr().err == "waiting: 1 file, 1.0 MiB\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_an_error_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long error has a line of its own above the bar, once per change; the hint comes once, before."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    long = "file:///mnt/share/bucket: " + "the directory is not writable, " * 5 + "see to it"
    with Waiting("uploading", hint="Ctrl-C does something") as waiting:
        for error in (None, long, long, "another", long):
            waiting.show(report(pending_files=2, pending_bytes=1 << 20, last_error=error))
    said = terminal.getvalue()
    assert said.count(f"last error: {long}\n") == 2 and said.count("last error: another") == 1
    assert said.count("Ctrl-C does something") == 1
    assert "2 files, 1.0 MiB" in said


def test_the_end_is_told_with_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    """Safe: 0. Pending: 3, with how much, where it is, what went wrong and how to go on."""
    safe = {"remote": "s3://b/p", "store": "/s", "pending": {"files": 0, "bytes": 0}, "sent_bytes": 0,
            "last_error": None}  # fmt: skip
    assert _tell_end("/m", safe) == 0
    assert "everything is on s3://b/p" in capsys.readouterr().out
    left = {**safe, "pending": {"files": 2, "bytes": 3 << 20}, "last_error": "access denied"}
    assert _tell_end("/m", left) == EXIT_PENDING
    said = capsys.readouterr().out
    assert all(part in said for part in ("2 files", "3.0 MiB", "/s", "ckptfs mount /m", "access denied"))
    assert _tell_end("/m", {**safe, "remote": None}) == 0
    assert "only there" in capsys.readouterr().out
    assert _tell_end("/m", left, as_json=True) == EXIT_PENDING
    document = json.loads(capsys.readouterr().out)
    assert document["pending"] == left["pending"] and document["mountpoint"] == "/m" and document["unmounted"]


def test_our_errors_are_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours, or of the system, is told without a traceback."""
    for error in (CkptfsError("broken\nin two"), PermissionError(13, "Permission denied", "/x")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("ckptfs_mount.cli.seeing.ask_about", fail)
        done = CliRunner().invoke(main, ["publish", "/x"])
        assert done.exit_code == 1
        assert len(done.output.splitlines()) == 1 and done.output.startswith("Error: ")


@pytest.mark.parametrize(("typed", "meant"), [("mont", "mount"), ("unmount", "umount"), ("daemn", None), ("xyz", None)])
def test_a_misspelt_command_is_corrected(typed: str, meant: str | None) -> None:
    """The nearest command is named, never a hidden one."""
    done = CliRunner().invoke(main, [typed, "/x"])
    assert done.exit_code == 2
    assert f"No such command '{typed}'." in done.output
    assert (f"Did you mean '{meant}'?" in done.output) if meant else ("mean" not in done.output)


def test_the_labels_of_status_do_not_outshine_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only the first line is bold."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    _show(
        {
            "path": "/", "state": "sealed", "safe": False, "remote": None, "newest_safe_set": None, "last_error": None,
            "remote_wrong": None, "saves": {"files": 2, "blocked_s": 1.5, "longest_s": 0.75},
            "at_risk": {"files": None, "bytes": 5, "eta_s": None, "sets": []},
            "bytes": {"logical": 5, "stored": 5, "on_remote": 0},
            "mount": {"mountpoint": "/m", "pid": 1, "mounted_at_s": 0.0, "read_only": False, "stopping": False,
                      "store": "/s", "passthrough": {"state": "on", "reason": None}},
        }
    )  # fmt: skip
    verdict, *rows = terminal.getvalue().splitlines()
    assert verdict.startswith("\x1b[1;31mIf this machine vanished now")
    assert len(rows) >= 5 and all(row.startswith("\x1b[2m") for row in rows)
    assert any("state" in row and "/ is sealed" in row for row in rows)
    assert any("waited 1.5 s for 2 files, 750 ms at longest" in row for row in rows)


def test_no_name_forges_a_line_of_status() -> None:
    """A directory may be called anything, on any machine."""
    forged = "/x\nnothing would be lost\x1b[32m\udcff"
    plain = "/x\\nnothing would be lost\\x1b[32m\\xff"
    assert _at_risk(forged) == plain  # as an older daemon tells it
    assert _at_risk({"path": forged, "kind": None, "complete": True, "missing": None}) == plain
    lacking = _at_risk({"path": "/é", "kind": "sharded", "complete": False, "missing": "a\nb"})
    assert lacking == "/é: taken for an unfinished sharded checkpoint without a\\nb, which is waited for"


def test_every_command_explains_itself() -> None:
    """--help of each command works and says more than its usage."""
    for name, command in main.commands.items():
        done = CliRunner().invoke(main, [name, "--help"])
        assert done.exit_code == 0
        assert command.help and command.help.split("\n")[0] in " ".join(done.output.split())


def test_each_mountpoint_has_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readable, distinct for equal last names, stable; the environment and an explicit name come first."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(placement.STORE_VARIABLE, raising=False)
    one, two = placement.choose("/a/ckpt", None), placement.choose("/b/ckpt", None)
    assert one != two and one == placement.choose("/a/ckpt", None)
    assert one.parent == tmp_path / "ckptfs" and one.name.startswith("ckpt-")
    odd = placement.choose("/a/..größe \n" + "x" * 200, None).name
    assert odd.isascii() and len(odd) < 60 and not odd.startswith(".")
    monkeypatch.setenv(placement.STORE_VARIABLE, str(tmp_path / "env"))
    assert placement.choose("/a/ckpt", None) == tmp_path / "env"
    assert placement.choose("/a/ckpt", str(tmp_path / "named")) == tmp_path / "named"


def test_a_named_store_is_remembered_for_its_mountpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one mount with --store the mountpoint alone finds it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(placement.STORE_VARIABLE, raising=False)
    usual, named = placement.choose("/m", None), tmp_path / os.fsdecode(b"some\xff")
    for store in (usual, named):
        store.mkdir(parents=True)
        (store / "catalog.db").touch()
    placement.remember("/m", named)
    assert placement.choose("/m", None) == named
    assert placement.choose("/other", None) != named
    placement.remember("/m", usual)
    assert placement.choose("/m", None) == usual


@pytest.mark.parametrize("kind", ["usual", "named", "environment"])
def test_a_store_that_is_gone_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A remembered store that is no store any more is refused, also when only its disk's empty mountpoint is left."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(placement.STORE_VARIABLE, raising=False)
    store = placement.choose("/m", str(tmp_path / "s") if kind == "named" else None)
    if kind == "environment":
        store = tmp_path / "s"
        monkeypatch.setenv(placement.STORE_VARIABLE, str(store))
    placement.remember("/m", store)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is gone.*--store.*--remote"):
            placement.choose("/m", None)
        store.mkdir(exist_ok=True, parents=True)
    assert placement.choose("/m", None, anew=True) == store
    assert placement.choose("/m", str(store)) == store
    (store / "catalog.db").touch()
    assert placement.choose("/m", None) == store


def test_only_an_unused_store_is_discarded(tmp_path: Path) -> None:
    """One that is locked, or that has bytes of a file, stays."""
    store = tmp_path / "s"
    (store / "images").mkdir(parents=True)
    (store / "catalog.db").touch()
    with open(store / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        placement.discard(store)
        assert store.exists()
    (store / "images" / "1").touch()
    placement.discard(store)
    assert store.exists()
    (store / "images" / "1").unlink()
    placement.discard(store)
    assert not store.exists()
    placement.discard(store)


def test_a_directory_of_other_things_is_no_store(tmp_path: Path) -> None:
    """A store is new, empty, or one already."""
    placement.check("/m", tmp_path / "new")
    placement.check("/m", tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        placement.check("/m", tmp_path)
    (tmp_path / "catalog.db").touch()
    placement.check("/m", tmp_path)
    for mountpoint, store in (("/m", "/m"), ("/m", "/m/s"), ("/s/m", "/s")):
        with pytest.raises(StoreError, match="lies"):
            placement.check(mountpoint, Path(store))
    placement.check("/m", Path("/mm"))


def test_an_order_and_its_report_travel_between_processes() -> None:
    """An order reads back equal; a report arrives line by line, and nobody listening stops a mount."""
    order = Order("/m\udcff", "/s", "s3://b/p", lag_s=0.5, allow_other=False)
    assert Order.load(order.dump()) == order
    reading, writing = os.pipe()
    reporter = PipeReporter(writing)
    reporter.note("one")
    reporter.ready("s3://b/p")
    with open(reading) as pipe:
        assert pipe.read() == '{"note": "one"}\n{"ready": true, "remote": "s3://b/p"}\n'
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(CkptfsError, match="gone"):
        PipeReporter(writing).note("x")
    PipeReporter(writing).error("nobody hears this")


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is looked at; the rest of `du` needs no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(main, ["du", str(tmp_path), "--plot", "growth.png"])
    assert (done.exit_code, done.output) == (1, "Error: plots need matplotlib: pip install 'ckptfs[plot]'\n")
    assert CliRunner().invoke(main, ["du", str(tmp_path), "--plot", "growth.doc"]).exit_code == 2


def test_tables_have_whole_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """However long, and however strange: what does not print is escaped, and nothing is taken for markup."""
    strange = output.shown(b"[bold]\x1b[31m\xff\n" + b"x" * 300)
    output.print_table(("path", "bytes"), [(strange, "1"), ("short", "23")], total=("together", "24"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith(r"[bold]\x1b[31m\xff\n" + "x" * 300)
    assert [line.split()[-1] for line in lines] == ["bytes", "1", "23", "24"]
    assert len({len(line.rstrip()) for line in lines}) == 1, "numbers end in one column"


def test_who_may_not_look_into_the_store_reads_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file in somebody else's mount is compared and shown like any other."""
    place = Place("/mnt", tmp_path / "store", b"/file")
    monkeypatch.setattr("ckptfs.insight.sealed.place_of", lambda path: place)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"the same")
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (done.exit_code, done.output) == (0, "1 identical (8 B)\n")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "a")])
    assert done.exit_code == 0 and "Not sealed in a mount" in done.output


def test_a_lost_interrupt_is_raised_again() -> None:
    """One that came while an object was cleaned up is only printed by Python; whoever looks afterwards gets it."""
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as check:
        check()
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_who_reads_no_more_of_what_is_printed_gets_no_error(tmp_path: Path) -> None:
    """As of `ckptfs inspect FILE | head`."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfs_mount", "inspect", "--chunks", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) != 0
