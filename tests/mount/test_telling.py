"""What commands say must be so: what is pending, what was published, how fast it goes."""

from __future__ import annotations

import json
import os
import shutil

import ckptfs
from tests.support.machines import Machines
from tests.support.mounts import until
from tests.support.proxy import Faults


def test_publish_says_what_is_left_out(machines: Machines) -> None:
    """A file that is open for writing is named, with exit status 3; what is closed is published all the same."""
    site = machines.site("site")
    top = machines.mount(site)
    (top / "d").mkdir()
    (top / "d" / "closed").write_bytes(b"1")
    with open(top / "d" / "open", "wb", buffering=0) as file:
        file.write(b"2")
        done = site.run("publish", str(top / "d"))
        assert done.status == 3 and "not published: /d/open is open for writing" in done.err
        answer = json.loads(site.run("publish", "--json", str(top)).out)
        assert (answer["published"], answer["unfinished"]) == (False, ["/d/open"])
        assert ckptfs.publish(top / "d" / "closed") == []
        assert "closed" in site.run("ls", f"{machines.url}/d").out
    assert ckptfs.publish(top) == []
    assert "open" in site.run("ls", f"{machines.url}/d").out


def test_removals_are_waited_for_and_are_no_loss(machines: Machines) -> None:
    """`wait` returns when the remote knows what was removed; until then status counts changes, not lost files."""
    way = machines.proxy()
    site = machines.site("site", by=way)
    top = machines.mount(site)
    (top / "old").mkdir()
    for number in range(3):
        (top / "old" / f"{number}").write_bytes(b"1")
    assert ckptfs.wait(top, "replicated", 30)
    way.faults = Faults("refuse")
    shutil.rmtree(top / "old")
    status = site.status()
    assert not status["safe"] and status["pending"]["changes"] and status["pending"]["files"] == 0
    assert status["at_risk"]["files"] == 0
    said = site.run("status", str(top)).out
    assert "would be lost" in said and "only" in said and "of names would be lost" in said
    assert not ckptfs.wait(top, "replicated", 1)
    assert os.getxattr(top, "user.ckptfs.state") == b"sealed"
    way.heal()
    assert ckptfs.wait(top, "replicated", 30)
    assert site.run("ls", machines.url).out == ""
    assert site.status()["safe"]


def test_an_open_log_that_grew_is_at_risk(machines: Machines) -> None:
    """What the last seal of a log does not have is counted, and safe again once it was sent."""
    logs = {"log_after_s": 0.5, "log_seal_s": 2.0, "log_seal_after_fsync_s": 2.0}
    site = machines.site("site", settings=logs)
    top = machines.mount(site)
    with open(top / "events.out.tfevents.1", "wb", buffering=0) as log:

        def sent() -> bool:
            log.write(b"one line\n")
            return "events.out" in site.run("ls", machines.url).out

        until(sent, "the log on the remote")
        until(lambda: site.status()["safe"], "all of it to be there")
        log.write(b"news\n" * 100)
        status = site.status()
        assert not status["safe"] and status["at_risk"]["files"] == 1 and 0 < status["at_risk"]["bytes"] <= 600
        until(lambda: site.status()["safe"], "the news to be there")


def test_what_a_set_waits_for_is_told(machines: Machines) -> None:
    """A directory that is taken for a checkpoint which is not finished holds others back: status says why."""
    site = machines.site("site", settings={"max_lag_s": 600.0})
    top = machines.mount(site)
    for number in range(12):
        (top / f"checkpoint-{number}").mkdir()
        (top / f"checkpoint-{number}" / "model.safetensors").write_bytes(b"weights")
    sets = site.status()["at_risk"]["sets"]
    assert len(sets) == 12
    assert {"kind": "HF Trainer", "complete": False, "missing": "trainer_state.json"}.items() <= sets[0].items()
    said = site.run("status", str(top)).out
    assert "/checkpoint-0: taken for an unfinished HF Trainer checkpoint without trainer_state.json" in said
    assert "and 2 more" in said
    for number in range(12):
        (top / f"checkpoint-{number}" / "trainer_state.json").write_bytes(b"{}")
    until(lambda: site.status()["safe"], "all of it to be there")


def test_a_rate_is_told_only_when_it_is_known(machines: Machines) -> None:
    """After an idle time the estimate is that of the sending, not of the waiting."""
    way = machines.proxy()
    site = machines.site("site", by=way, tuning={"pack_bytes": 1 << 18, "piece_bytes": 1 << 18, "upload_most": 2})
    top = machines.mount(site)
    (top / "first").write_bytes(os.urandom(1 << 18))
    assert ckptfs.wait(top, "replicated", 30)
    until(lambda: site.status()["at_risk"]["eta_s"] in (None, 0.0), "nothing to do")
    way.faults = Faults(methods=frozenset({"PUT"}), up_bytes_per_s=1 << 20)
    (top / "second").write_bytes(os.urandom(6 << 20))
    etas = []
    while not ckptfs.wait(top, "replicated", 0.3):
        eta = site.status()["at_risk"]["eta_s"]
        etas += [eta] if eta is not None else []
    assert etas and max(etas) < 30, etas


def test_how_long_programs_waited_is_told_by_path(machines: Machines) -> None:
    """A slow flush of the disk is the writer's wait: it is counted, with the file, and with no other."""
    site = machines.site("site")
    top = machines.mount(site)
    for name in ("one", "two"):
        (top / name).mkdir()
        for number in range(3):
            with open(top / name / f"{number}", "wb", buffering=0) as file:
                file.write(b"1")
                os.fsync(file.fileno())
    saves = {path: ckptfs.status(top / path)["saves"] for path in ("", "one", "two", "two/1")}
    assert [each["files"] for each in saves.values()] == [6, 3, 3, 1]
    assert all(0 < each["longest_s"] <= each["blocked_s"] for each in saves.values())
    assert abs(saves[""]["blocked_s"] - saves["one"]["blocked_s"] - saves["two"]["blocked_s"]) < 1e-6
    (top / "two" / "1").read_bytes()
    assert ckptfs.status(top / "two" / "1")["saves"] == saves["two/1"]
    assert "programs waited" in site.run("status", str(top)).out
