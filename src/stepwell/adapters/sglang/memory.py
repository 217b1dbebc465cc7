"""Judge how SGLang's host memory and stepwell's shared memory divide what a machine has.

    buffer_only   SGLang's host memory is a buffer; shared memory is the one copy of pages in DRAM
    cache         SGLang's host memory is a cache of its own: what is in it lies in shared memory once more

Both are DRAM of the same machine, and count against the same cgroup.
"""

from __future__ import annotations

from typing import Final

import stepwell as sw

MODES: Final = ("cache", "buffer_only")
CLEARLY_LARGER: Final = 2
"""Of shared memory beside a cache of SGLang's: each page that both hold is DRAM spent twice, so with twice its size at
most half of shared memory is."""
SUBJECT: Final = "SGLang's host memory and shared memory"


def warnings_of(
    pool_bytes: int,
    *,
    ranks: int,
    shared_bytes: int | None,
    mode: str,
    memory: sw.Limit | None = None,
) -> list[sw.Finding]:
    """Say what of the sizes does not go together; empty where they do.

    Args:
        pool_bytes: of one rank's host pools. ranks: on this host. shared_bytes: capacity of the shared tier, for all
            processes together; None: there is none. mode: SGLang's --hicache-host-memory-mode.
        memory: what there is; by default what this machine and its cgroups allow.
    """
    found: list[sw.Finding] = []
    host_bytes = pool_bytes * ranks
    if memory is None:
        try:
            memory = sw.memory_limit()
        except OSError:
            memory = None
    shared = shared_bytes or 0
    if memory is not None and host_bytes + shared > memory.nbytes:
        found.append(
            _warn(
                f"{_show(host_bytes)} of {ranks} rank(s) and {_show(shared)} shared are more than "
                f"{_show(memory.nbytes)} ({memory.source})",
                why="the kernel ends a process once both are full; SGLang and its weights need memory beside",
                remedy="a smaller --hicache-size, or a smaller shared.capacity",
            )
        )
    if mode == "buffer_only" and shared_bytes is None:
        found.append(
            _warn(
                "buffer_only, and no shared tier",
                why="SGLang keeps no page in host memory then, so every hit beyond the device is read from disk",
                remedy='{"stepwell": {"shared": {"capacity": "..."}}}  # the DRAM that SGLang does not take',
            )
        )
    if mode == "cache" and shared_bytes is not None and shared < CLEARLY_LARGER * host_bytes:
        found.append(
            _warn(
                f"{_show(shared)} shared beside a cache of {_show(host_bytes)} in SGLang's host memory",
                why="most of shared memory holds pages that SGLang has in host memory too: DRAM is spent twice",
                remedy=f"leave shared out, give it {_show(CLEARLY_LARGER * host_bytes)} or more, or "
                "--hicache-host-memory-mode buffer_only",
            )
        )
    return found


def _warn(found: str, *, why: str, remedy: str) -> sw.Finding:
    return sw.Finding("warn", SUBJECT, found, why, remedy)


def _show(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
