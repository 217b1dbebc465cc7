"""Read a GGUF file's metadata and find its tensors, every length checked before it is believed.

The file, little-endian (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3):

    "GGUF"  version u32  tensors u64  entries u64
    entries x   key string, kind u32, value       a string: bytes u64, UTF-8; an array: kind u32, count u64, values
    tensors x   name string, dims u32, dims x u64 (the fastest first), kind u32, offset u64
    padding to a multiple of general.alignment (32 where absent), then the tensors at their offsets

It is read here rather than with gguf.GGUFReader, which believes the lengths of a damaged file (an array said to have
2^60 items is read until memory ends) and takes 2 s for a vocabulary of 49,152; dequantisation is gguf's.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Value = int | float | bool | str | list["Value"] | npt.NDArray[np.generic]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class GgufError(ValueError):
    """Report a file that is not GGUF, is damaged, or holds a model that cannot be served; names the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Say where a tensor lies. shape: the slowest first, as numpy has it; kind: a GGMLQuantizationType's number."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(slots=True)
class GgufFile:
    """Hold what a file says. Invariant: `data` is the whole file; offsets of tensors lie in it."""

    path: Path
    data: bytes | mmap.mmap
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def sha256(self) -> str:
        """Return the hash of the whole file: what its weights are named by."""
        return hashlib.sha256(self.data).hexdigest()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; raises GgufError where it is absent (without a default) or of another type."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise GgufError(f"{self.path}: {key} is {_show(value)}, a whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; raises GgufError as integer() does."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float):
            raise GgufError(f"{self.path}: {key} is {_show(value)}, a number is needed")
        return float(value)  # type: ignore[arg-type]

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; raises GgufError as integer() does."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise GgufError(f"{self.path}: {key} is {_show(value)}, a string is needed")
        return value

    def strings(self, key: str) -> list[str]:
        """Return an array of strings; raises GgufError as integer() does."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise GgufError(f"{self.path}: {key} is {_show(value)}, an array of strings is needed")
        return value  # type: ignore[return-value]


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the metadata and the list of tensors of a file.

    Raises: GgufError for a file that is not GGUF or is damaged, with the place; OSError.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    return _Reader(path, data).read()


def _show(value: object) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Reader:
    """Read from front to back; no byte is taken before it is known to be there."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self._file = GgufFile(path, data)
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise self._damage("it does not begin with GGUF: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._damage(f"version {version}: 2 and 3 can be read (a big-endian file looks like this too)")
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        for _ in range(self._counted(entries, at_least=12)):
            key = self._string()
            if key in self._file.metadata:
                raise self._damage(f"{_show(key)} is there twice")
            self._file.metadata[key] = self._value(self._scalar("I"))
        found: dict[str, Tensor] = {}
        for _ in range(self._counted(tensors, at_least=24)):
            name, dims = self._string(), self._scalar("I")
            if name in found or not 1 <= dims <= _MAX_DIMS:
                raise self._damage(f"tensor {_show(name)} is there twice, or has {dims} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
            found[name] = Tensor(shape, self._scalar("I"), self._scalar("Q"))
        alignment = self._file.integer("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise self._damage(f"general.alignment is {alignment}, a power of two is needed")
        start = -(-self._at // alignment) * alignment
        for name, tensor in found.items():
            if start + tensor.offset > len(self._data):
                raise self._damage(f"tensor {_show(name)} lies at {start + tensor.offset}, past the end")
            self._file.tensors[name] = Tensor(tensor.shape, tensor.kind, start + tensor.offset)
        return self._file

    def _damage(self, what: str) -> GgufError:
        return GgufError(f"{self._file.path}: {what} (byte {self._at} of {len(self._data)})")

    def _counted(self, count: int, *, at_least: int) -> int:
        """Return a count of things of `at_least` bytes each, if so many can follow."""
        if count > (len(self._data) - self._at) // at_least:
            raise self._damage(f"{count} items are said to follow: the file is damaged or cut short")
        return count

    def _take(self, size: int) -> bytes:
        self._counted(size, at_least=1)
        self._at += size
        return self._data[self._at - size : self._at]

    def _scalar(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def _string(self) -> str:
        try:
            return self._take(self._scalar("Q")).decode()
        except UnicodeDecodeError as cause:
            raise self._damage(f"a string is not UTF-8: {cause}") from cause

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._damage(f"a value is of kind {kind}, which is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> Value:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return [self._string() for _ in range(self._counted(count, at_least=8))]
        if kind not in _SCALARS:
            raise self._damage(f"an array holds values of kind {kind}, which cannot be read")
        item = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(self._take(self._counted(count, at_least=item.itemsize) * item.itemsize), item)
