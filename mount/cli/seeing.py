"""`ckptfs status`, `wait`, `publish` and `ls`: what is safe, and what is on a remote."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from typing import Any

import click

from ckptfs.client import TARGETS, ask_about
from ckptfs.client import status as ask_status
from ckptfs.errors import MountError
from ckptfs.local.mountinfo import CKPTFS_TYPE, mounts

from ..order import EXIT_PENDING
from .output import DURATION, JSON, ago, files, pending, shown, size
from .output import duration as in_words
from .waiting import Waiting

_SETS_SHOWN = 10


@click.command()
@click.argument("path", required=False)
@JSON
def status(path: str | None, as_json: bool) -> None:
    """What would be lost if this machine vanished now; then what is mounted and pending.

    Of the mount that holds PATH, or of every mount.
    """
    paths = [path] if path is not None else [each.mountpoint for each in mounts() if each.type == CKPTFS_TYPE]
    if as_json:
        found = [_status_or_error(each) for each in paths] if path is None else ask_status(path)
        click.echo(json.dumps(found, indent=1))
        return
    if not paths:
        raise MountError("no ckptfs is mounted here")
    for number, each in enumerate(paths):
        if number:
            click.echo()
        try:
            _show(ask_status(each))
        except MountError as error:
            if path is not None:
                raise
            text = str(error)  # a dead mount must not hide the others
            click.echo(text if each in text else f"{each}: {text}")


@click.command()
@click.argument("path")
@click.option("--for", "target", type=click.Choice(TARGETS), default="replicated", show_default=True)
@click.option("--timeout", type=DURATION, help="Give up after this long, with exit status 3.")
@JSON
def wait(path: str, target: str, timeout: float | None, as_json: bool) -> None:
    """Wait until everything under PATH is sealed, replicated or verified.

    What is there is cut at once, without waiting for it to settle. Exit status 3: not reached in time.
    """
    with Waiting("waiting", quiet=as_json) as waiting:
        answer = ask_about(path, "wait", waiting.show, target=target, timeout_s=timeout)
    if as_json:
        click.echo(json.dumps({"path": path, "target": target, **answer}))
    elif not answer["reached"]:
        click.echo(f"{path} is {answer['state']}, not {target}, after {in_words(timeout)}", err=True)
    if not answer["reached"]:
        sys.exit(EXIT_PENDING)


@click.command()
@click.argument("path")
@JSON
def prefetch(path: str, as_json: bool) -> None:
    """Bring every file under PATH to this disk now, so that reading it never waits for the remote.

    Nothing is fetched when all of it does not fit on the store's disk; reading works all the same.
    """
    with Waiting("fetching", quiet=as_json) as waiting:
        answer = ask_about(path, "prefetch", waiting.show)
    if as_json:
        click.echo(json.dumps({"path": path, **answer}))
    elif answer["files"]:
        click.echo(f"fetched {files(answer['files'])}, {size(answer['bytes'])}")
    else:
        click.echo("everything is here already")


@click.command()
@click.argument("path")
@JSON
def publish(path: str, as_json: bool) -> None:
    """Make what is under PATH visible on the remote now; returns when it is."""
    with Waiting("publishing", quiet=as_json) as waiting:
        answer = ask_about(path, "publish", waiting.show)
    unfinished = answer["unfinished"]
    if as_json:
        click.echo(json.dumps({"path": path, "published": not unfinished, **answer}))
    for each in unfinished:
        click.echo(f"not published: {each} is open for writing; it is when it was closed", err=True)
    if unfinished:
        sys.exit(EXIT_PENDING)


@click.command("ls")
@click.argument("url")
@click.option("-R", "--recursive", is_flag=True, help="Everything below, too.")
@JSON
def list_remote(url: str, recursive: bool, as_json: bool) -> None:
    """List what is published at URL (s3://bucket/prefix or file:///directory, and a path in it), without mounting."""
    from ckptfs.replica.browse import RemoteView, find_remote  # brings boto3

    remote, inside = find_remote(url)
    view = RemoteView(remote)
    found = list(view.walk(inside)) if recursive else [(entry.name, entry) for entry in view.entries(inside)]
    if as_json:
        rows = [
            {
                "path": os.fsdecode(path),
                "mode": stat.filemode(entry.mode),
                "size": entry.size,
                "mtime_s": entry.mtime_ns / 1e9,
                "uid": entry.uid,
                "gid": entry.gid,
                "target": None if entry.target is None else os.fsdecode(entry.target),
            }
            for path, entry in found
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    width = max((len(str(entry.size)) for _, entry in found), default=0)
    for path, entry in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.mtime_ns / 1e9))
        arrow = b"" if entry.target is None else b" -> " + entry.target
        name = path + arrow  # bytes, for a program that reads them; a name may hold anything, which a terminal would do
        if sys.stdout.isatty():
            name = shown(name).encode()
        click.echo(f"{stat.filemode(entry.mode)} {entry.size:>{width}} {when} ".encode() + name)


def _status_or_error(mountpoint: str) -> dict[str, Any]:
    """The document of one of several mounts; a dead one's says only why there is no more to say."""
    try:
        return ask_status(mountpoint)
    except MountError as error:
        return {"mount": {"mountpoint": mountpoint}, "safe": False, "error": str(error)}


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    mount, risk = document["mount"], document["at_risk"]
    if document["remote_wrong"]:
        console.print(Text(f"Nothing is known to be safe: {document['remote_wrong']}", style="bold red"))
    elif document["safe"]:
        console.print(Text("If this machine vanished now, nothing would be lost.", style="bold green"))
    else:
        console.print(Text(f"If this machine vanished now, {_lost(document)} would be lost.", style="bold red"))
        for each in risk["sets"][:_SETS_SHOWN]:
            console.print(Text(f"  {_at_risk(each)}"))
        if len(risk["sets"]) > _SETS_SHOWN:
            console.print(Text(f"  and {len(risk['sets']) - _SETS_SHOWN} more"))
    for line in _damage(mount["mountpoint"], document.get("damaged", [])):  # an older daemon does not know it
        console.print(Text(line, style="" if line.startswith(" ") else "bold red"))
    safe_set = document["newest_safe_set"]
    if safe_set is not None:
        path = _in_a_line(safe_set["path"])
        console.print(Text(f"The newest complete set that is safe: {path} ({ago(safe_set['at'])})."))
    elif document["remote"] is not None:
        console.print(Text("No complete set is safe yet."))
    rows = [
        ("mount", f"{mount['mountpoint']}{', read-only' if mount['read_only'] else ''}"
                  f"{', stopping' if mount['stopping'] else ''} "
                  f"(pid {mount['pid']}, since {ago(mount['mounted_at_s'])})"),
        ("remote", document["remote"] or "none: the store alone"),
        ("store", mount["store"]),
        ("passthrough", mount["passthrough"]["state"]
                        + (f": {reason}" if (reason := mount["passthrough"]["reason"]) else "")),
        ("state", f"{document['path']} is {document['state']}"),
    ]  # fmt: skip
    saves = document.get("saves")  # an older daemon, still running, does not know it
    if saves and saves["files"]:
        rows.append(("saving", f"programs waited {_briefly(saves['blocked_s'])} for {files(saves['files'])}, "
                               f"{_briefly(saves['longest_s'])} at longest"))  # fmt: skip
    if document["remote"] is not None:
        since = document.get("oldest_pending_at_s")  # an older daemon, still running, does not know it
        left = pending({**_pending(document), "eta_s": risk["eta_s"]})
        rows.append(("pending", left if since is None else f"{left}, the oldest for {in_words(time.time() - since)}"))
        rows.append(("last success", ago(document["last_success_at_s"])))
        rows.append(("last error", document["last_error"] or "none"))
    sizes = document["bytes"]
    rows.append(("bytes", f"{size(sizes['logical'])} in files, {size(sizes['stored'])} stored here, "
                          f"{size(sizes['on_remote'])} on the remote"))  # fmt: skip
    for name, value in rows:
        console.print(Text(f"{name:<13}", style="dim") + Text(value))


def _damage(mountpoint: str, damaged: list[dict[str, Any]]) -> list[str]:
    if not damaged:
        return []
    lines = ["On the remote, readers did not find what should be there:"]
    for each in damaged[:_SETS_SHOWN]:
        why = _in_a_line(each["why"])
        lines.append(f"  {why}" if each["object"] in why else f"  {each['object']}: {why}")
    if len(damaged) > _SETS_SHOWN:
        lines.append(f"  and {len(damaged) - _SETS_SHOWN} more")
    lines.append(f"  `ckptfs scrub --remote {mountpoint}` says which files need it, and mends what can be.")
    return lines


def _at_risk(each: str | dict[str, Any]) -> str:
    """A set, and what it waits for. Older daemons, still running, tell only its path."""
    path = _in_a_line(each if isinstance(each, str) else each["path"])
    if isinstance(each, str) or each["complete"]:
        return path
    lacking = f" without {_in_a_line(each['missing'])}" if each["missing"] else ""
    return f"{path}: taken for an unfinished {each['kind']} checkpoint{lacking}, which is waited for"


def _in_a_line(path: str) -> str:
    """Names may come from other machines: none moves the cursor, or forges a line."""
    return shown(path.encode(errors="surrogateescape"))


def _briefly(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _lost(document: dict[str, Any]) -> str:
    risk = document["at_risk"]
    if document["remote"] is None:
        return f"everything ({size(risk['bytes'])})"
    if not risk["files"] and not risk["bytes"]:
        here = sum(each["here"] for each in document.get("damaged", ()))
        return "only " + pending(_pending(document)) if not here else "what lies here and in damaged packs"
    lost = f"{files(risk['files'])}, {size(risk['bytes'])}"
    return lost if risk["eta_s"] is None else f"{lost} (safe in about {in_words(risk['eta_s'])})"


def _pending(document: dict[str, Any]) -> dict[str, Any]:
    left = document["pending"]
    return {"pending_files": left["files"], "pending_bytes": left["bytes"], "pending_changes": left["changes"]}
