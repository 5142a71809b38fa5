"""Recognised checkpoint layouts, and when each is complete."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.replica.sets import is_set, is_set_name, is_telling, is_temporary_below, judge, shards


def verdict(name: bytes, names: set[bytes], files: dict[bytes, bytes] | None = None, latest: bytes | None = None):
    return judge(name, names, (files or {}).get, lambda each: latest if each == b"latest" else None)


@pytest.mark.parametrize(
    ("name", "names", "kind", "complete"),
    [
        (b"checkpoint-5", set(), "HF Trainer", False),
        (b"checkpoint-5", {b"model.safetensors"}, "HF Trainer", False),
        (b"checkpoint-5", {b"model.safetensors", b"trainer_state.json"}, "HF Trainer", True),
        (b"tmp-checkpoint-5", {b"model.safetensors", b"trainer_state.json"}, "HF Trainer", False),
        (b"checkpoint-5", {b"model.safetensors", b"random_states_0.pkl"}, None, True),
        (b"step", {b"__0_0.distcp"}, "DCP", False),
        (b"step", {b"__0_0.distcp", b".metadata.tmp"}, "DCP", False),
        (b"step", {b"__0_0.distcp", b".metadata"}, "DCP", True),
        (b"step", {b"__0_0.distcp", b".metadata", b".metadata.tmp"}, "DCP", False),
        (b"7.orbax-checkpoint-tmp-123", {b"_METADATA"}, "Orbax", False),
        (b"7", {b"_CHECKPOINT_METADATA", b"d"}, "Orbax", True),
        (b"7", {b"d"}, None, True),
        (b"m", {b"model-00001-of-00002.safetensors"}, "sharded", False),
        (b"m", {b"model-00001-of-00002.safetensors", b"model-00002-of-00002.safetensors"}, "sharded", False),
        (
            b"m",
            {
                b"model-00001-of-00002.safetensors",
                b"model-00002-of-00002.safetensors",
                b"model.safetensors.index.json",
            },
            "sharded",
            True,
        ),
        (b"m", {b"model-00001-of-00003.gguf"}, None, True),
        (b"runs", {b"events.out.tfevents.1"}, None, True),
        (b"runs", set(), None, True),
    ],
)
def test_kinds(name: bytes, names: set[bytes], kind: str | None, complete: bool) -> None:
    """A layout is recognised by its names, and complete exactly with the file that its framework writes last."""
    found = verdict(name, names)
    assert (found.kind, found.complete) == (kind, complete)


def test_index_names_files() -> None:
    """A file that an index names must be there; a damaged index leaves the shards' own numbers."""
    index = b"model.safetensors.index.json"
    body = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    assert verdict(b"m", {index, b"one.safetensors"}, {index: body}).missing == b"two.safetensors"
    assert verdict(b"m", {index, b"one.safetensors", b"two.safetensors"}, {index: body}).complete
    for damaged in (b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"\xff\xfe"):
        assert verdict(b"m", {index}, {index: damaged}).complete


@pytest.mark.parametrize(
    "body",
    [
        b'{"weight_map":' + b"[" * 1_000_000,
        b'{"weight_map":' + b'{"a":' * 1_000_000,
        b'{"weight_map":{' + b'"a":"' * 1_000_000,
        b'{"weight_map":{' + b":" + b" " * 10_000_000,
        b'{"weight_map":{' + b':"' + b"x" * 10_000_000,
        b'{"weight_map":{"a":' + b"9" * 10_000_000 + b"}}",
        b'{"weight_map":{"a":"../../etc/passwd.bin","b":"\\u0000.bin","c":".bin"}}',
    ],
    ids=range(7),
)
def test_hostile_index(body: bytes) -> None:
    """Nesting, endless strings and numbers, names of elsewhere: nothing is waited for, and it takes no time."""
    began = time.perf_counter()
    assert verdict(b"m", {b"model.safetensors.index.json"}, {b"model.safetensors.index.json": body}).complete
    assert time.perf_counter() - began < 2.0


@given(st.binary(max_size=300) | st.text(alphabet='{}[]":,. \\ab', max_size=300).map(str.encode))
def test_any_index(body: bytes) -> None:
    """Whatever is in it, the directory gets a verdict."""
    verdict(b"m", {b"model.safetensors.index.json"}, {b"model.safetensors.index.json": b'{"weight_map":' + body})


def test_trainer_with_shards() -> None:
    """A Trainer checkpoint with trainer_state.json but without one of its shards is not complete."""
    names = {b"trainer_state.json", b"model-00001-of-00002.safetensors", b"model.safetensors.index.json"}
    assert verdict(b"checkpoint-1", names).missing == b"model-00002-of-00002.safetensors"


def test_hostile_shard_count() -> None:
    """A shard that claims to be one of billions costs no more than the directory's own size."""
    found = verdict(b"m", {b"m-00001-of-99999999999.bin"})
    assert not found.complete and found.missing is not None


@pytest.mark.parametrize(
    ("latest", "complete"),
    [(None, False), (b"global_step9", False), (b"global_step10\n", True), (b"global_step30", True), (b"best", False)],
)
def test_deepspeed(latest: bytes | None, complete: bool) -> None:
    """A DeepSpeed step is complete when `latest` names it or a later one."""
    found = verdict(b"global_step10", {b"mp_rank_00_model_states.pt"}, latest=latest)
    assert (found.kind, found.complete) == ("DeepSpeed", complete)


def test_quick_checks() -> None:
    """The quick checks agree with the rules that they stand for."""
    assert is_telling(b"trainer_state.json") and is_telling(b"__0_0.distcp") and is_telling(b".metadata")
    assert not is_telling(b"model.pt") and not is_telling(b"events.out.tfevents")
    assert is_set_name(b"checkpoint-9") and is_set_name(b"latest") and not is_set_name(b"model.pt")
    assert is_temporary_below([b"out", b"7.orbax-checkpoint-tmp-1"]) and not is_temporary_below([b"out", b"7"])
    assert is_set(b"checkpoint-1", set()) and not is_set(b"out", {b"model.pt"})


@pytest.mark.parametrize(
    ("directory", "file", "others", "expected"),
    [
        (b"m", b"model-00002-of-00003.safetensors", [b"model-00001-of-00003.safetensors", b"a-00001-of-00003.bin"],
         [b"model-00001-of-00003.safetensors", b"model-00002-of-00003.safetensors"]),
        (b"m", b"__10_0.distcp", [b"__2_0.distcp", b".metadata"], [b"__2_0.distcp", b"__10_0.distcp"]),
        (b"global_step5", b"mp_rank_01_model_states.pt", [b"mp_rank_00_model_states.pt", b"mp_rank_00_optim_states.pt"],
         [b"mp_rank_00_model_states.pt", b"mp_rank_01_model_states.pt"]),
        (b"m", b"layer_01-model_00.pt", [b"layer_00-model_00.pt"], [b"layer_00-model_00.pt", b"layer_01-model_00.pt"]),
        (b"m", b"step-100.pt", [b"step-200.pt"], []),
        (b"m", b"model.safetensors", [b"optimizer.pt"], []),
        (b"m", b"model-00001-of-00001.safetensors", [b"config.json"], []),
    ],
)  # fmt: skip
def test_shards_of_one_thing(directory: bytes, file: bytes, others: list[bytes], expected: list[bytes]) -> None:
    """Which files hold parts of one thing, in the order of their numbers; steps beside each other are no parts."""
    assert shards(directory, file, [file, *others]) == expected
