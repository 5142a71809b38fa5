"""Which directories are one checkpoint, and whether it is complete. Pure: names and the content of small files in.

The layouts, and where what is known of them comes from:

Orbax        `*.orbax-checkpoint-tmp*` until it is renamed (orbax/checkpoint/_src/path/atomicity.py)
HF Trainer   `tmp-checkpoint-*` until it is renamed; `checkpoint-N` is complete with `trainer_state.json`, which is
             written last, and every shard (transformers/trainer.py, _save_checkpoint)
DCP          `*.distcp`, complete with `.metadata` and without `.metadata.tmp`
             (torch/distributed/checkpoint/filesystem.py, finish)
sharded      `X-0000i-of-0000N.safetensors` or `.bin`: all N, the index, and every file that it names
DeepSpeed    `global_stepN`, complete when `latest` beside it names it or a later one
             (deepspeed/runtime/engine.py, save_checkpoint)

Everything else is not recognised, and settles by time. So does accelerate's `checkpoint-N` with `random_states_*`,
which has no last file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

INDEX_MOST = 16 << 20
"""Largest index file that is read; a trillion parameters make one of ten MiB."""

_ORBAX_TEMPORARY = re.compile(rb".*\.orbax-checkpoint-tmp").match
_TRAINER_TEMPORARY = re.compile(rb"tmp-checkpoint-").match
_TRAINER = re.compile(rb"checkpoint-\d+").fullmatch
_DEEPSPEED = re.compile(rb"global_step(\d+)").fullmatch
_SHARD = re.compile(rb"(.+)-(\d{5,})-of-(\d{5,})\.(safetensors|bin)").fullmatch
_LAYER = re.compile(rb"layers?[-_.]?\d+.*").fullmatch
_NUMBER = re.compile(rb"(\d+)")
_INDEX = re.compile(rb".+\.(safetensors|bin)\.index(\.[\w-]+)?\.json").fullmatch
_NAMED = re.compile(rb':\s*"([^"\\/]+\.(?:safetensors|bin))"\s*[,}]').findall
_LOG = re.compile(rb"events\.out\.tfevents\..*|run-.*\.wandb").fullmatch
_TELLING = re.compile(
    rb"trainer_state\.json|random_states_.*|.*\.distcp|\.metadata(\.tmp)?|_CHECKPOINT_METADATA|"
    rb".+-\d{5,}-of-\d{5,}\.(safetensors|bin)|.+\.index(\.[\w-]+)?\.json"
).fullmatch
_SET_NAME = re.compile(
    rb"(tmp-)?checkpoint-.*|global_step\d+|latest|zero_to_fp32\.py|.*\.orbax-checkpoint-tmp.*"
).fullmatch


@dataclass(frozen=True)
class Verdict:
    """What a directory is."""

    kind: str | None
    """None: not recognised as one checkpoint."""
    complete: bool = True
    missing: bytes | None = None
    """A name in the directory for want of which it is incomplete: until that appears, it stays so."""


UNRECOGNISED = Verdict(None)

Read = Callable[[bytes], bytes | None]
"""The content of a small file by name; None when there is no such file, or its bytes are not here."""


def judge(name: bytes, names: Collection[bytes], read: Read, sibling: Read) -> Verdict:
    """What the directory *name* that holds *names* is; *read* reads files in it, *sibling* files beside it."""
    if _ORBAX_TEMPORARY(name):
        return Verdict("Orbax", False)
    if _TRAINER_TEMPORARY(name):
        return Verdict("HF Trainer", False)
    kind = _kind(name, names)
    if kind is None:
        return UNRECOGNISED
    if b".metadata.tmp" in names:
        return Verdict(kind, False)
    missing = _missing(name, names, kind, read)
    if missing is not None:
        return Verdict(kind, False, missing)
    if kind == "DeepSpeed" and not _deepspeed_named(name, sibling(b"latest")):
        return Verdict(kind, False)
    return Verdict(kind)


def is_set(name: bytes, names: Collection[bytes]) -> bool:
    """Whether directory *name* that holds *names* is one checkpoint, complete or not."""
    return _is_temporary(name) or _kind(name, names) is not None


def shards(name: bytes, file: bytes, names: Collection[bytes]) -> list[bytes]:
    """Those of *names* in directory *name* among which one checkpoint is split, *file* being one, by their numbers.

    Empty where that is not known: files like step-100.pt and step-200.pt are no parts of one thing.
    """
    shard = _SHARD(file)
    if shard:
        pattern = rb"%s-\d{%d}-of-%s\.%s" % (re.escape(shard[1]), len(shard[2]), shard[3], shard[4])
    elif file.endswith(b".distcp"):
        pattern = rb".*\.distcp"
    elif _LAYER(file) or _DEEPSPEED(name):
        pattern = rb"\d+".join(map(re.escape, _NUMBER.split(file)[::2]))
    else:
        return []
    found = [each for each in names if re.fullmatch(pattern, each, re.DOTALL)]
    return sorted(found, key=_by_numbers) if len(found) > 1 else []


def _by_numbers(name: bytes) -> list[tuple[int, bytes]]:
    parts = _NUMBER.split(name)
    return [(int(part), b"") if index % 2 else (0, part) for index, part in enumerate(parts)]


def is_temporary_below(path: Collection[bytes]) -> bool:
    """Whether one of the directory names in *path* marks all below it as unfinished."""
    return any(_is_temporary(name) for name in path)


def is_telling(name: bytes) -> bool:
    """Whether the coming or going of file *name* can change what its directory is. A quick check."""
    return _TELLING(name) is not None


def is_set_name(name: bytes) -> bool:
    """Whether *name* belongs to a recognised layout, so that its coming or going needs no time to settle."""
    return _SET_NAME(name) is not None


def is_log_name(name: bytes) -> bool:
    """Whether a file of this name is a log from its first byte on: TensorBoard's, or a run of Weights & Biases."""
    return _LOG(name) is not None


def _is_temporary(name: bytes) -> bool:
    return bool(_ORBAX_TEMPORARY(name) or _TRAINER_TEMPORARY(name))


def _kind(name: bytes, names: Collection[bytes]) -> str | None:
    if _TRAINER(name) and not (
        b"trainer_state.json" not in names and any(each.startswith(b"random_states_") for each in names)
    ):
        return "HF Trainer"
    if _DEEPSPEED(name):
        return "DeepSpeed"
    if any(each.endswith(b".distcp") for each in names):
        return "DCP"
    if b"_CHECKPOINT_METADATA" in names:
        return "Orbax"
    if any(_SHARD(each) or _INDEX(each) for each in names):
        return "sharded"
    return None


def _missing(name: bytes, names: Collection[bytes], kind: str, read: Read) -> bytes | None:
    """A name that a complete checkpoint would have and this one lacks."""
    if any(each.endswith(b".distcp") for each in names) and b".metadata" not in names:
        return b".metadata"
    if kind == "HF Trainer" and b"trainer_state.json" not in names:
        return b"trainer_state.json"
    return _missing_shard(names, read)


def _missing_shard(names: Collection[bytes], read: Read) -> bytes | None:
    indexed: set[bytes] = set()
    for name in names:
        match = _INDEX(name)
        if match:
            indexed.add(match[1])
            absent = _named_by_index(read(name)).difference(names)
            if absent:
                return min(absent)
    seen: set[tuple[bytes, bytes, bytes]] = set()
    for name in names:
        match = _SHARD(name)
        if match and (match[1], match[3], match[4]) not in seen:
            stem, number, count, suffix = match.groups()
            seen.add((stem, count, suffix))
            for each in range(1, min(int(count), len(names) + 1) + 1):
                shard = b"%s-%0*d-of-%s.%s" % (stem, len(number), each, count, suffix)
                if shard not in names:
                    return shard
            if suffix not in indexed:
                return b"%s.%s.index.json" % (stem, suffix)
    return None


def _named_by_index(data: bytes | None) -> set[bytes]:
    """The shards that an index names; none when it cannot be read (the shards' own numbers then count).

    Looked for, not parsed: whatever a file of this name holds, that takes one pass, and no more memory than the names.
    """
    return set() if data is None else set(_NAMED(data, max(0, data.find(b'"weight_map"'))))


def _deepspeed_named(name: bytes, latest: bytes | None) -> bool:
    own = _DEEPSPEED(name)
    named = _DEEPSPEED((latest or b"").strip())
    return bool(own and named and int(named[1]) >= int(own[1]))
