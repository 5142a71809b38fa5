"""The control socket: server and client, over a real socket."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.client import Conversation, ask
from ckptfs.errors import CkptfsError, MountError, NameMissing
from ckptfs_mount.control import ControlServer, Handler, Reply, Request


@asynccontextmanager
async def serving(store: Path, **handlers: Handler) -> AsyncIterator[ControlServer]:
    server = ControlServer(store, handlers)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(30):
            await nursery.start(server.run)
            yield server
        nursery.cancel_scope.cancel()


async def asked(store: Path, op: str, on_progress: Any = None, **fields: Any) -> Any:
    return await trio.to_thread.run_sync(lambda: ask(store, op, on_progress, **fields), abandon_on_cancel=True)


async def echo(request: Request, reply: Reply) -> Any:
    for number in range(3):
        await reply.progress({"number": number})
    return dict(request)


async def missing(request: Request, reply: Reply) -> Any:
    raise NameMissing("no such name")


async def broken(request: Request, reply: Reply) -> Any:
    raise ZeroDivisionError


def test_requests_progress_results_and_errors(tmp_path: Path) -> None:
    """A result follows its progress; our errors keep their class; a bug is an error too, and none ends the server."""

    async def main() -> None:
        async with serving(tmp_path, echo=echo, missing=missing, broken=broken):
            seen: list[Any] = []
            answer = await asked(tmp_path, "echo", seen.append, path="/\udcff", many="x" * 200_000)
            assert answer["path"] == "/\udcff" and len(answer["many"]) == 200_000
            assert seen == [{"number": 0}, {"number": 1}, {"number": 2}]
            with pytest.raises(NameMissing, match="no such name"):
                await asked(tmp_path, "missing")
            with pytest.raises(CkptfsError, match="ZeroDivisionError"):
                await asked(tmp_path, "broken")
            with pytest.raises(CkptfsError, match="does not know"):
                await asked(tmp_path, "unheard")
            assert (await asked(tmp_path, "echo"))["op"] == "echo"

    trio.run(main)


def test_hanging_up_cancels_the_request(tmp_path: Path) -> None:
    """A handler whose client is gone is cancelled; others are not."""

    async def main() -> None:
        started, cancelled = trio.Event(), trio.Event()

        async def forever(request: Request, reply: Reply) -> Any:
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        async with serving(tmp_path, forever=forever, echo=echo):
            conversation = await trio.to_thread.run_sync(lambda: Conversation(tmp_path, "forever"))
            await started.wait()
            conversation.__exit__()
            await cancelled.wait()
            await asked(tmp_path, "echo")

    trio.run(main)


def test_nonsense_is_hung_up_on(tmp_path: Path) -> None:
    """What is no JSON object on one line is answered by closing, and the server goes on."""

    async def main() -> None:
        async with serving(tmp_path, echo=echo):
            for data in (b"hello\n", b"[1]\n", b"\xff\xfe\n", b"[" * 50_000 + b"\n", b""):
                stream = await trio.open_unix_socket(str(tmp_path / "control.sock"))
                await stream.send_all(data)
                if not data:
                    await stream.send_eof()
                assert await stream.receive_some() == b""
                await stream.aclose()
            await asked(tmp_path, "echo")

    trio.run(main)


def test_retiring_takes_the_socket_away_and_finishes_what_is_open(tmp_path: Path) -> None:
    """After retire the name is free for the next daemon; an open request still gets its answer; then run returns."""

    async def main() -> None:
        started, release = trio.Event(), trio.Event()

        async def held(request: Request, reply: Reply) -> Any:
            started.set()
            await release.wait()
            return "answered"

        answers: list[Any] = []
        server = ControlServer(tmp_path, {"held": held})
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)

                async def client() -> None:
                    answers.append(await asked(tmp_path, "held"))

                nursery.start_soon(client)
                await started.wait()
                server.retire()
                assert not (tmp_path / "control.sock").exists()
                with pytest.raises(MountError, match="no daemon answers"):
                    await asked(tmp_path, "held")
                release.set()
        assert answers == ["answered"]

    trio.run(main)


def test_the_socket_is_private_and_its_path_may_be_long(tmp_path: Path) -> None:
    """Mode 0600 from the first moment, where the path is longer than a socket's may be, and over a stale one."""
    store = tmp_path / ("d" * 100) / ("e" * 100)
    store.mkdir(parents=True)
    (store / "control.sock").write_text("stale")

    async def main() -> None:
        async with serving(store, echo=echo):
            assert stat.S_IMODE((store / "control.sock").stat().st_mode) == 0o600
            assert (await asked(store, "echo"))["op"] == "echo"

    trio.run(main)


def test_no_daemon_is_said_so(tmp_path: Path) -> None:
    """Without a socket, with a stale one, without a store: a MountError that names the store."""
    with pytest.raises(MountError, match=str(tmp_path)):
        ask(tmp_path, "hello")
    with pytest.raises(MountError, match="no daemon answers"):
        ask(tmp_path / "missing", "hello")
