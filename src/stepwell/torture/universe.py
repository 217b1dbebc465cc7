"""Say what there is to save: chains of pages that share prefixes, in namespaces, and the bytes of each page."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import Namespace, PageGeometry

PAGE_TOKENS: Final = 4
LAYERS: Final = 2
STREAMS: Final = 2
MOST_PAGES: Final = 12  # of a chain
AXES: Final = "slot layer stream token head dim"
STRANGERS: Final = 8  # chains that nobody ever saves
NAMESPACES: Final = (None, Namespace(salt="one"), Namespace(adapter="two"), Namespace(adapter="two", salt="one"))

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt: its tokens, and the numbers of its pages. Chains that begin alike share the pages of that beginning."""

    namespace: Namespace | None
    tokens: npt.NDArray[np.int32]
    pages: tuple[int, ...]


@dataclass(slots=True)
class Universe:
    """Everything that a run may save, and some that it never saves.

    Invariant: the same seed gives the same universe; a page's number stands for its namespace and all tokens up to its
    end, as its key does, which is made here without the store's code. Pages below `known` may be saved, the others are
    those of `strangers`, which are only asked for.
    """

    seed: int
    page_bytes: int
    known: int = 0
    chains: list[Chain] = field(default_factory=list)
    strangers: list[Chain] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _stamps: dict[tuple[int, int], Bytes] = field(default_factory=dict)

    @classmethod
    def made(cls, seed: int, *, pages: int, page_bytes: int) -> Universe:
        """Make a universe of about `pages` pages: a multiple of 16 bytes each."""
        made = cls(seed, page_bytes)
        rng = random.Random(f"universe {seed}")
        trunk: list[int] = []
        while len(made.keys) < pages:
            if not trunk or rng.random() < 0.4:  # another beginning; now and then the same tokens in another namespace
                trunk = trunk if trunk and rng.random() < 0.2 else _tokens(rng, rng.randrange(1, 6))
                namespace = rng.choice(NAMESPACES)
            own = _tokens(rng, rng.randrange(0, MOST_PAGES - len(trunk) // PAGE_TOKENS + 1))
            made.chains.append(made._chain(namespace, trunk + own))
        made.known = len(made.keys)
        while len(made.strangers) < STRANGERS:
            like = rng.choice(made.chains)
            tokens = like.tokens.tolist()
            tokens[rng.randrange(len(tokens))] ^= 1  # a beginning that somebody saves, and then another token
            made.strangers.append(made._chain(rng.choice(NAMESPACES), tokens))
        return made

    @property
    def geometry(self) -> PageGeometry:
        """What a page's bytes are."""
        return PageGeometry(
            model="torture",
            revision=str(self.seed),
            layers=LAYERS,
            kv_heads=1,
            head_dim=self.page_bytes // (LAYERS * STREAMS * PAGE_TOKENS),
            dtype="uint8",
            page_tokens=PAGE_TOKENS,
        )

    def stamp(self, page: int, epoch: int) -> Bytes:
        """Return the bytes that a page has under an epoch, uint8[page_bytes]: each layer a stream of its own."""
        found = self._stamps.get((page, epoch))
        if found is None:
            name = self.keys[page] + epoch.to_bytes(8, "little")
            piece = self.page_bytes // LAYERS
            layers = [hashlib.shake_128(name + bytes([layer])).digest(piece) for layer in range(LAYERS)]
            found = self._stamps[page, epoch] = np.frombuffer(b"".join(layers), np.uint8)
        return found

    def stamps(self, pages: tuple[int, ...] | list[int], epoch: int) -> Bytes:
        """Return the bytes of some pages, uint8[n, page_bytes]."""
        rows = np.empty((len(pages), self.page_bytes), np.uint8)
        for row, page in zip(rows, pages, strict=True):
            row[:] = self.stamp(page, epoch)
        return rows

    def shaped(self, rows: Bytes) -> npt.NDArray[np.uint8]:
        """Return rows of bytes as a pool of `AXES`, the same memory."""
        return rows.reshape(len(rows), LAYERS, STREAMS, PAGE_TOKENS, 1, -1)

    def _chain(self, namespace: Namespace | None, tokens: list[int]) -> Chain:
        array = np.array(tokens, np.int32)
        seed = None if namespace is None else namespace.seed()
        link = seed or b""
        pages = []
        for at in range(0, len(tokens), PAGE_TOKENS):
            link = hashlib.sha256(link + array[at : at + PAGE_TOKENS].astype("<u4").tobytes()).digest()
            number = self._numbers.setdefault(link, len(self.keys))
            if number == len(self.keys):
                self.keys.append(link)
            pages.append(number)
        return Chain(namespace, array, tuple(pages))


def _tokens(rng: random.Random, pages: int) -> list[int]:
    return [rng.randrange(1 << 16) for _ in range(pages * PAGE_TOKENS)]
