"""The `ckptfs` command: one module a group of commands. Parses and prints; what is done is done elsewhere.

Exit status: 0 done and safe; 1 not done, with one line on stderr; 2 wrong usage; 3 done or given up, but something is
not safe yet.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import click

from ckptfs.errors import CkptfsError

from .insight import diff, du, estimate, inspect
from .mounting import auth, daemon, mount
from .repairing import fsck, scrub
from .seeing import list_remote, prefetch, publish, status, wait
from .unmounting import umount


class _Commands(click.Group):
    """Turns our errors into one line and status 1, and misspelt commands into the one that was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            # click's own suggestions, if it has any, name hidden commands too
            visible = [name for name, command in self.commands.items() if not command.hidden]
            close = difflib.get_close_matches(args[0], visible, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read what we print has enough; click ends quietly
            raise
        except (CkptfsError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                text = f"{os.fsdecode(error.filename)}: {error.strerror}"
            raise click.ClickException(" ".join(text.split())) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckptfs")
def main() -> None:
    """A checkpoint file system: mount a directory, write checkpoints at local speed, have them replicated.

    \b
      ckptfs mount ~/ckpt --remote s3://bucket/run
      python train.py --output_dir ~/ckpt/exp1
      ckptfs umount ~/ckpt
    """


for _command in (
    *(mount, umount, auth, daemon),
    *(status, wait, publish, prefetch, list_remote),
    *(fsck, scrub),
    *(du, diff, inspect, estimate),
):
    main.add_command(_command)
