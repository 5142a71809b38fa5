"""Which paths are members of one series, as frameworks name them."""

from __future__ import annotations

import pytest

from ckptfs.series import series_key, series_member


@pytest.mark.parametrize(
    ("path", "pattern", "numbers"),
    [
        (b"checkpoint-100/model.safetensors", b"checkpoint-*/model.safetensors", (100,)),
        (b"/run/checkpoint-100/model-00001-of-00003.safetensors",
         b"/run/checkpoint-*/model-00001-of-00003.safetensors", (100,)),
        (b"model-step-1.pt", b"model-step-*.pt", (1,)),
        (b"run-2/step_10", b"run-2/step_*", (10,)),
        (b"epoch=3-step=1200.ckpt", b"epoch=*-step=*.ckpt", (3, 1200)),
        (b"epoch=3-val_loss=0.25.ckpt", b"epoch=*-val_loss=*.ckpt", (3,)),
        (b"iter_0000100/mp_rank_00/model_optim_rng.pt", b"iter_*/mp_rank_00/model_optim_rng.pt", (100,)),
        (b"global_step70/zero_pp_rank_0_mp_rank_01_optim_states.pt",
         b"global_step*/zero_pp_rank_0_mp_rank_01_optim_states.pt", (70,)),
        (b"ckpt-9.data-00000-of-00001", b"ckpt-*.data-00000-of-00001", (9,)),
        (b"checkpoint-100/rng_state_3.pth", b"checkpoint-*/rng_state_3.pth", (100,)),
        (b"Epoch12/weights.h5", b"Epoch*/weights.h5", (12,)),
        (b"ocdbt/1000/default/d/0ab1", b"ocdbt/*/default/d/0ab1", (1000,)),
        (b"0001000.ckpt", b"*.ckpt", (1000,)),
        (b"model.7.pt", b"model.*.pt", (7,)),
        (b"run-1/model-5.pt", b"run-1/model-*.pt", (5,)),
        (b"checkpoint-100/global_step100/x.pt", b"checkpoint-*/global_step*/x.pt", (100, 100)),
        (b"step-\xff-4", b"step-\xff-4", None),
    ],
)  # fmt: skip
def test_the_number_that_counts_is_found(path: bytes, pattern: bytes, numbers: tuple[int, ...] | None) -> None:
    """Steps, epochs and bare numbers count; shards, ranks and metrics do not."""
    found = series_key(path)
    assert found == (None if numbers is None else (pattern, numbers))


@pytest.mark.parametrize(
    "path",
    [b"", b"/", b"model.pt", b"model-00001-of-00003.safetensors", b"rank_0/shard-2.bin", b"llama-7b/model.pt",
     b"__0_0.distcp", b"events.out.tfevents.1700000000123.host.77.0", b"checkpoint-last", b"fp16.bin", b"v2.pt",
     b"layer_12-model_00-model_states.pt", b"data-123456789012345.bin"],
)  # fmt: skip
def test_other_numbers_are_left_alone(path: bytes) -> None:
    """A number that tells parts, sizes or times makes no series."""
    assert series_key(path) is None
    assert series_member(path) is None


def test_members_are_what_was_saved_at_once() -> None:
    """The file or directory whose name has the number, whatever lies in it."""
    assert series_member(b"run/checkpoint-100/global_step100/rank_0.pt") == (
        b"run/checkpoint-100", (b"run/checkpoint-*", (100,)),
    )  # fmt: skip
    assert series_member(b"run/epoch_2/step_10/model.pt") == (b"run/epoch_2/step_10", (b"run/epoch_*/step_*", (2, 10)))
    assert series_member(b"run/epoch_2/model.pt") == (b"run/epoch_2", (b"run/epoch_*", (2,)))
    assert series_member(b"model-step-1.pt") == (b"model-step-1.pt", (b"model-step-*.pt", (1,)))


def test_a_series_is_ordered_by_its_numbers() -> None:
    """Steps 9, 10 and 100 come in this order, whatever padding."""
    names = [b"step-100", b"step-9", b"step-010"]
    keys = [series_key(name) for name in names]
    assert {key.pattern for key in keys if key} == {b"step-*"}
    assert sorted(key.numbers for key in keys if key) == [(9,), (10,), (100,)]
