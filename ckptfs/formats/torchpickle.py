"""What a torch.save pickle says of its tensors, read without running it.

Source: https://docs.python.org/3/library/pickletools.html for the opcodes; torch/serialization.py (`persistent_id`) and
torch/_utils.py (`_rebuild_tensor_v2`, `_v3`) for what the values mean. A pickle is a program for a small stack machine.
This module steps through it with inert values: a global is its name, a call is a record of its arguments. Nothing is
looked up, imported or called, so a hostile pickle can at worst tell a wrong name or dtype. Where the program is not
understood, what was learned until then stands.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ckptfs.errors import FormatError
from ckptfs.formats.base import BITS, MAX_NAME, UNKNOWN, Tensor, described, joined

MAX_STEPS = 500_000
"""Opcodes read, about a second's worth and 100 MB of values at worst. A tensor takes 35; storages that are described
behind the first 14,000 stay without dtype, which costs a guess in the codec and no more."""

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "int8", "QUInt8Storage": "uint8", "QInt32Storage": "int32",
}  # fmt: skip


@dataclass(frozen=True)
class StorageUse:
    """How the pickle uses one storage: by the first tensor that lies in it."""

    key: str
    """The storage's name: its bytes are the member `data/<key>`."""
    storage_dtype: str
    """What the storage counts; `UNKNOWN` for bytes."""
    dtype: str
    name: str
    shape: tuple[int, ...] | None
    """The tensor's shape where known; it may be a view of a part of the storage."""


@dataclass(frozen=True)
class Pickle:
    """What a pickle says."""

    is_whole: bool
    """Whether its end was reached, and all of it was followed."""
    uses: list[StorageUse]
    """Every storage that it mentions, in order of first mention."""
    items: list[object]
    """What is in it, where it is a list; of anything but constants, something inert."""


@dataclass(eq=False, slots=True)
class _Global:
    name: str


@dataclass(eq=False, slots=True)
class _Storage:
    key: str
    dtype: str


@dataclass(eq=False, slots=True)
class _Node:
    """A container, or a call that was not made: *call* names it, *pairs* are what was put in, by label."""

    call: str = ""
    args: object = ()
    pairs: Sequence[tuple[object, object]] = ()

    def extend(self, pairs: Iterable[tuple[object, object]]) -> None:
        if not isinstance(self.pairs, list):
            self.pairs = []  # only now: a hostile pickle makes many empty ones
        self.pairs.extend(pairs)


_MARK = _Global("mark")


class _Stop(Exception):
    """The program ended, or does something that this machine does not follow."""


class _Machine:
    """The pickle machine with inert values."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.storages: dict[str, _Storage] = {}

    def step(self, opcode: str, arg: object) -> None:
        """Do one opcode; IndexError or _Stop where the program makes no sense."""
        stack = self.stack
        if opcode in _LITERALS:
            stack.append(arg)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(str(arg))] = stack[-1]
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[int(str(arg))])
        elif opcode == "MARK":
            stack.append(_MARK)
        elif opcode in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append(_Node())
        elif opcode in _TUPLES:
            size = _TUPLES[opcode]
            self._take(size)
        elif opcode in ("TUPLE", "FROZENSET"):
            stack.append(tuple(self._marked()))
        elif opcode in ("LIST", "DICT"):
            node = _Node()
            self._fill(node, self._marked(), pairwise=opcode == "DICT")
            stack.append(node)
        elif opcode in ("APPENDS", "ADDITEMS", "SETITEMS"):
            values = self._marked()
            self._fill(stack[-1], values, pairwise=opcode == "SETITEMS")
        elif opcode == "APPEND":
            value = stack.pop()
            self._fill(stack[-1], [value], pairwise=False)
        elif opcode == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._fill(stack[-1], [key, value], pairwise=True)
        elif opcode in ("GLOBAL", "INST"):
            name = str(arg).replace(" ", ".")
            stack.append(_Global(name) if opcode == "GLOBAL" else _Node(name, tuple(self._marked())))
        elif opcode == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Global(f"{str(module)[:MAX_NAME]}.{str(attribute)[:MAX_NAME]}"))
        elif opcode in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            stack.append(_Node(_name(function), args))
        elif opcode == "NEWOBJ_EX":
            kwargs, args, function = stack.pop(), stack.pop(), stack.pop()
            stack.append(_Node(_name(function), (args, kwargs)))
        elif opcode == "OBJ":
            values = self._marked()
            stack.append(_Node(_name(values[0]), tuple(values[1:])))
        elif opcode == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], _Node) and stack[-1].call != "collections.OrderedDict":  # its state: _metadata
                stack[-1].extend([(None, state)])
        elif opcode == "BINPERSID":
            stack.append(self._persistent(stack.pop()))
        elif opcode == "POP":
            stack.pop()
        elif opcode == "POP_MARK":
            self._marked()
        elif opcode == "DUP":
            stack.append(stack[-1])
        elif opcode not in ("PROTO", "FRAME"):
            raise _Stop

    def items(self) -> list[object]:
        """What is in the list that is the result; [] when it is none."""
        result = self.stack[-1] if self.stack else None
        return [value for _, value in result.pairs] if isinstance(result, _Node) else []

    def _marked(self) -> list[object]:
        """Pop everything above the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:  # IndexError at the bottom
            at -= 1
            if at < 0:
                raise _Stop
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def _take(self, size: int) -> None:
        """Replace the top *size* values by a tuple of them."""
        at = len(self.stack) - size
        if at < 0:
            raise _Stop
        self.stack[at:] = [tuple(self.stack[at:])]

    @staticmethod
    def _fill(container: object, values: list[object], pairwise: bool) -> None:
        if not isinstance(container, _Node):
            return
        if pairwise:
            container.extend(zip(values[::2], values[1::2], strict=False))
        else:
            container.extend(enumerate(values, len(container.pairs)))

    def _persistent(self, pid: object) -> object:
        """torch's persistent id: ('storage', class, key, location, number of elements)."""
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[2], str)):
            return None
        kind = _name(pid[1]).rpartition(".")[2]
        return self.storages.setdefault(pid[2], _Storage(pid[2], _STORAGES.get(kind, UNKNOWN)))


_LITERALS = frozenset(
    code.name
    for code in pickletools.opcodes
    if code.arg is not None
    and [after.name for after in code.stack_after]
    and not code.stack_before
    and code.name not in ("GLOBAL", "INST", "GET", "BINGET", "LONG_BINGET", "PERSID", "EXT1", "EXT2", "EXT4")
)
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(file: BinaryIO) -> Pickle:
    """What the pickle at *file*'s position says; *file* is then behind it, if it is whole.

    Never raises for what the bytes are.
    """
    machine = _Machine()
    is_whole = False
    try:
        for steps, (opcode, arg, _) in enumerate(pickletools.genops(file)):
            is_whole = opcode.name == "STOP"
            if is_whole or steps >= MAX_STEPS:
                break
            machine.step(opcode.name, arg)
    except (_Stop, IndexError, KeyError, ValueError, OverflowError, FormatError):
        pass  # a pickle that is cut off or does what torch's never do: what was learned stands
    uses: dict[str, StorageUse] = {}
    for name, value, tensor in _walk(machine.stack):
        if value.key not in uses:
            dtype, shape = value.dtype, None
            if tensor is not None:
                dtype, shape = _described(tensor, dtype)
            uses[value.key] = StorageUse(value.key, value.dtype, dtype, name, shape)
    for key, storage in machine.storages.items():
        uses.setdefault(key, StorageUse(key, storage.dtype, storage.dtype, "", None))
    return Pickle(is_whole, [uses[key] for key in machine.storages], machine.items())


def entries(value: object) -> Sequence[tuple[object, object]]:
    """What a dict of a pickle holds, by key, or an object by attribute; nothing for any other *value*."""
    if not isinstance(value, _Node):
        return ()
    if len(value.pairs) == 1 and value.pairs[0][0] is None:
        state = value.pairs[0][1]
        return state.pairs if isinstance(state, _Node) else ()
    return value.pairs


def size(value: object) -> tuple[int, ...] | None:
    """A torch.Size, or a tuple of numbers; None for any other *value*."""
    if isinstance(value, _Node) and value.call == "torch.Size" and isinstance(value.args, tuple) and value.args:
        value = value.args[0]
    if isinstance(value, tuple) and len(value) <= 64 and all(type(each) is int and each >= 0 for each in value):
        return value
    return None


def storage(use: StorageUse, start: int, end: int) -> Tensor:
    """The storage whose bytes lie there, as one tensor: as the first tensor in it where that is all of it."""
    name = use.name or use.key
    whole = described(name, use.dtype, use.shape or (), start, end)
    if whole.dtype == use.dtype:
        return whole
    return described(name, use.dtype, ((end - start) * 8 // BITS.get(use.dtype, 8),), start, end)


def storage_uses(pickle: bytes) -> list[StorageUse]:
    """Every storage that the pickle mentions, in order of first mention. Never raises for what the bytes are."""
    return read_pickle(io.BytesIO(pickle)).uses


def _described(tensor: _Node, dtype: str) -> tuple[str, tuple[int, ...] | None]:
    """The dtype and shape from a call to `_rebuild_tensor*`(storage, offset, size, stride, ...)."""
    args = tensor.args
    if not isinstance(args, tuple) or len(args) < 4:
        return dtype, None
    if dtype == UNKNOWN:  # _v3 uses an untyped storage and gives the dtype as a global such as torch.uint16
        for arg in args[4:]:
            name = _name(arg)
            if name.startswith("torch.") and name[6:] in BITS:
                dtype = name[6:]
    return dtype, size(args[2])


def _walk(roots: list[object]) -> Iterator[tuple[str, _Storage, _Node | None]]:
    """Every storage that can be reached, in the order of the program, with its path and the call that takes it."""
    seen: set[int] = set()
    todo: list[tuple[str, object, _Node | None]] = [("", root, None) for root in reversed(roots)]
    while todo:
        name, value, call = todo.pop()
        if isinstance(value, _Storage):
            yield name, value, call
            continue
        if not isinstance(value, _Node | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        children: list[tuple[str, object, _Node | None]] = []
        if isinstance(value, tuple):
            children = [(_join(name, at), item, None) for at, item in enumerate(value)]
        else:
            args = value.args if isinstance(value.args, tuple) else (value.args,)
            children = [(name, arg, value) for arg in args]
            children += [(_join(name, label), item, None) for label, item in value.pairs]
        todo.extend(reversed(children))


def _join(name: str, label: object) -> str:
    if label is None:
        return name
    if isinstance(label, float) or (isinstance(label, int) and label.bit_length() <= 64):
        label = str(label)
    return joined(name, label if isinstance(label, str) else "?")


def _name(value: object) -> str:
    return value.name if isinstance(value, _Global) else ""
