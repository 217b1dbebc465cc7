"""Take a picture of the radix tree of what was served: which pages are shared, and in which tier each is nearest.

The tree is drawn from the sequences, page by page, and the store is asked where their pages are: a picture of what a
request would find now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell import PageStore, Tier
from stepwell.demo.scenario import TreeEdge

Tokens = npt.NDArray[np.int32]

LABEL_TOKENS = 24
MOST_EDGES = 250


@dataclass(slots=True)
class _Page:
    """One page of the tree: where it is nearest ("" where no match would find it), and how many sequences have it."""

    tokens: Tokens
    depth: int
    tier: str = ""
    sequences: int = 0
    children: dict[bytes, _Page] = field(default_factory=dict)


def draw_tree(
    store: PageStore, sequences: Iterable[Tokens], *, page_tokens: int, most: int = MOST_EDGES
) -> list[TreeEdge]:
    """Return the edges of the tree over the whole pages of some sequences, parents before children.

    Args: most: edges to return; those with the fewest pages below them are left out.
    """
    root = _Page(np.empty(0, np.int32), -1)
    for tokens in sequences:
        with store.match(tokens) as match:  # for pools in CPU memory, so it leaves the device out
            tiers = [tier.name.lower() for _, pages, tier in match.spans for _ in range(pages)]
        near = store.cached(tokens, tiers=(Tier.DEVICE,)) // page_tokens
        tiers[:near] = [Tier.DEVICE.name.lower()] * near
        _insert(root, tokens, tiers, page_tokens)
    return _keep_largest(_edges(root), most)


def _insert(root: _Page, tokens: Tokens, tiers: Sequence[str], page_tokens: int) -> None:
    page = root
    for number in range(tokens.size // page_tokens):
        own = tokens[number * page_tokens : (number + 1) * page_tokens]
        page = page.children.setdefault(own.tobytes(), _Page(own, number))
        page.sequences += 1
        page.tier = tiers[number] if number < len(tiers) else ""


def _edges(root: _Page) -> list[TreeEdge]:
    """Join pages that follow each other without a fork into edges."""
    edges: list[TreeEdge] = []
    waiting: list[tuple[int | None, _Page]] = [(None, child) for child in reversed(root.children.values())]
    while waiting:
        parent, page = waiting.pop()
        chain = [page]
        while len(chain[-1].children) == 1:
            chain.extend(chain[-1].children.values())
        nearest: list[tuple[str, int]] = []
        for one in chain:
            if nearest and nearest[-1][0] == one.tier:
                nearest[-1] = (one.tier, nearest[-1][1] + 1)
            else:
                nearest.append((one.tier, 1))
        tokens = [token for one in chain[:LABEL_TOKENS] for token in one.tokens.tolist()]
        edges.append(
            TreeEdge(
                parent=parent,
                first_page=page.depth,
                pages=len(chain),
                sequences=page.sequences,
                nearest=nearest,
                tokens=tokens[:LABEL_TOKENS],
            )
        )
        waiting += [(len(edges) - 1, child) for child in reversed(chain[-1].children.values())]
    return edges


def pages_below(edges: Sequence[TreeEdge]) -> list[int]:
    """Return for each edge its own pages and those of all edges below it."""
    pages = [edge.pages for edge in edges]
    for place in range(len(edges) - 1, -1, -1):
        parent = edges[place].parent
        if parent is not None:
            pages[parent] += pages[place]
    return pages


def _keep_largest(edges: list[TreeEdge], most: int) -> list[TreeEdge]:
    """Leave out the edges with the fewest pages below them; a parent has more than its children, so it stays."""
    if len(edges) <= most:
        return edges
    pages = pages_below(edges)
    kept = sorted(sorted(range(len(edges)), key=lambda place: -pages[place])[:most])
    place_of: dict[int | None, int | None] = {None: None} | {old: new for new, old in enumerate(kept)}
    return [_under(edges[old], place_of[edges[old].parent]) for old in kept]


def _under(edge: TreeEdge, parent: int | None) -> TreeEdge:
    return TreeEdge(
        parent=parent,
        first_page=edge.first_page,
        pages=edge.pages,
        sequences=edge.sequences,
        nearest=edge.nearest,
        tokens=edge.tokens,
    )
