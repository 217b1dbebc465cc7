"""Turn tokens into prefix hashes: one SHA-256 per full page, chained on the page before.

    seed (namespace) or nothing
      └─ h0 = SHA256(seed || tokens of page 0 as little-endian u32)
           └─ h1 = SHA256(h0 || tokens of page 1) ...

So a prefix hash names a page's tokens and everything before them. Pure functions: the same in every
process and on every machine.

Source: the chain is that of SGLang 0.5.23 (mem_cache/cpp_utils/hash_binding.cpp), the seed that of
its `storage_namespace_seed`: pages saved through its backend and through Python have the same keys.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.errors import StepwellUsageError, TokenError

__all__ = ["Keys", "Namespace", "Tokens", "as_keys", "as_tokens", "epoch_number", "namespace_seed", "prefix_hashes"]


@runtime_checkable
class SupportsArray(Protocol):
    """An array of another library, e.g. of JAX or torch in CPU memory: numpy.asarray() takes it as a whole."""

    def __array__(self) -> npt.NDArray[Any]: ...


Tokens = npt.NDArray[np.int32] | npt.NDArray[np.integer] | Sequence[int] | SupportsArray
"""What takes tokens takes int32[n] (no copy), other integer arrays, JAX's and torch's too, and sequences of ints."""

Keys = npt.NDArray[np.uint8] | Sequence[bytes]
"""What every function that takes keys accepts: uint8[n, k] with k <= 64, or bytes of one length each."""

DIGEST_BYTES: Final = 32
MAX_KEY_BYTES: Final = 64
MAX_TOKEN: Final = 2**31 - 1
_NAMESPACE_TAG: Final = b"sglang-cache-namespace-v1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Keep the pages of one adapter (LoRA) and salt (tenant) apart from all others. None and "" are different."""

    adapter: str | None = None
    salt: str | None = None

    def seed(self) -> bytes | None:
        """Return what the first page's hash is chained on; see `namespace_seed`."""
        return namespace_seed(self.adapter, self.salt)


def epoch_number(epoch: int | str) -> int:
    """Return the 64-bit number under which an epoch stands in records.

    An int stands for itself; a string for the first 8 bytes of its SHA-256.

    Raises:
        StepwellUsageError: an int that is negative or over 64 bits.
    """
    if isinstance(epoch, str):
        return int.from_bytes(hashlib.sha256(epoch.encode()).digest()[:8], "little")
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**64:
        raise StepwellUsageError(f"epoch {epoch!r}: give a string, or an int from 0 to 2^64 - 1")
    return epoch


def as_keys(keys: Keys) -> npt.NDArray[np.uint8]:
    """Return keys as uint8[n, k], contiguous.

    Raises:
        StepwellUsageError: not two-dimensional, not bytes, of different lengths, empty, or over 64 bytes.
    """
    if not isinstance(keys, np.ndarray):
        lengths = {len(key) for key in keys}
        if len(lengths) > 1:
            raise StepwellUsageError(f"keys have lengths {sorted(lengths)}: give keys of one length a call")
        width = lengths.pop() if lengths else DIGEST_BYTES
        keys = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), width)
    if keys.ndim != 2 or keys.dtype != np.uint8 or not 1 <= keys.shape[1] <= MAX_KEY_BYTES:
        raise StepwellUsageError(f"keys are {keys.dtype}{list(keys.shape)}: give uint8[n, 1..{MAX_KEY_BYTES}]")
    return np.ascontiguousarray(keys)


@functools.lru_cache(maxsize=1024)  # it is asked for with every call that names a namespace
def namespace_seed(adapter: str | None, salt: str | None) -> bytes | None:
    """Return the seed that keeps the pages of one adapter and salt (tenant) apart from all others.

    Returns:
        32 bytes, or None where both are None: the default namespace has no seed. An empty text is
        not None.
    """
    if adapter is None and salt is None:
        return None
    digest = hashlib.sha256(_NAMESPACE_TAG)
    for part in (adapter, salt):
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def as_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Return tokens as int32[n], contiguous; a contiguous int32 array comes back itself.

    Raises:
        TokenError: Not one-dimensional, not integers (booleans are none), or a value below 0 or
            above 2^31 - 1; the message names the first such position and value.

    Cost: a pass or two to check the range, one more to copy where the dtype is not int32. A list
    costs 40 ns a token.
    """
    if isinstance(tokens, np.ndarray):
        array = tokens
    else:
        array = np.asarray(tokens) if isinstance(tokens, SupportsArray) else _array_of(tokens)
    if array.ndim != 1:
        raise TokenError(f"tokens have shape {array.shape}: give one dimension")
    if array.dtype.kind not in "iu":
        raise TokenError(f"tokens have dtype {array.dtype}: give integers, best int32")
    checked = np.ascontiguousarray(array, dtype=np.int32)
    if array.dtype == np.int32:  # cannot be too large: that saves a pass, a tenth of what hashing costs
        is_right = _core.first_negative(checked) < 0
    else:
        is_right = array.size == 0 or (array.min() >= 0 and array.max() <= MAX_TOKEN)
    if not is_right:
        position = int(np.argmax((array < 0) | (array > MAX_TOKEN)))
        raise TokenError(f"token {position} is {array[position]}: give 0 to {MAX_TOKEN}")
    return checked


def prefix_hashes(
    tokens: Tokens, *, page_tokens: int, seed: bytes | None = None
) -> npt.NDArray[np.uint8]:
    """Return the prefix hash of every full page, uint8[n // page_tokens, 32].

    A partial page at the end has none.

    Args:
        tokens: int32[n], or what `as_tokens` makes one of.
        page_tokens: Tokens of a page.
        seed: What the first page is chained on: a namespace's seed, or, to go on with a chain, the
            hash of the page before.

    Raises:
        TokenError: See `as_tokens`.
        ValueError: page_tokens below 1, or a seed that has not 32 bytes.

    Cost: 7 ns a token in pages of 16, without the GIL.
    """
    if seed is not None and len(seed) != DIGEST_BYTES:
        raise ValueError(f"seed has {len(seed)} bytes, not {DIGEST_BYTES}")
    return hash_chain(as_tokens(tokens), page_tokens=page_tokens, seed=seed)


def hash_chain(tokens: npt.NDArray[np.int32], *, page_tokens: int, seed: bytes | None) -> npt.NDArray[np.uint8]:
    """Return the prefix hash of every full page, as prefix_hashes(). Requires: tokens that as_tokens() has checked."""
    return _core.hash_chain(seed, tokens, page_tokens)


def _array_of(tokens: Sequence[int]) -> npt.NDArray[np.integer]:
    """Make an array of a sequence of Python or numpy ints, and of nothing else.

    Types are looked at first: numpy would take True for 1, and 1.5 among ints for a reason to
    make floats of them all.
    """
    for kind in set(map(type, tokens)):
        if not issubclass(kind, (int, np.integer)) or kind is bool:
            position = next(at for at, token in enumerate(tokens) if type(token) is kind)
            raise TokenError(f"token {position} is {tokens[position]!r}: give an int")
    try:
        return np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    except OverflowError:
        position = next(at for at, token in enumerate(tokens) if not 0 <= token <= MAX_TOKEN)
        raise TokenError(f"token {position} is {tokens[position]}: give 0 to {MAX_TOKEN}") from None
