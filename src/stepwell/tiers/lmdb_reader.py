"""Read an old LMDB environment in a process of its own.

    python -m stepwell.tiers.lmdb_reader DIR [ENTRIES [SECONDS]]

The environment may be damaged, and then this process dies or hangs in LMDB; whoever started it
learns that from its end.
Output: the newest remembered pages (`lmdb_index.read_environment`) and status 0; or what is wrong,
    in ASCII, and status 1.
All or nothing: what was read before a fault is not worth telling apart from what the fault made of
it.
"""

from __future__ import annotations

import resource
import signal
import sys

from stepwell.tiers.lmdb_index import read_environment


def main(arguments: list[str]) -> int:
    """Read the environment and write what it remembers to standard output."""
    if not 1 <= len(arguments) <= 3:
        sys.stdout.write("usage: python -m stepwell.tiers.lmdb_reader DIR [ENTRIES [SECONDS]]\n")
        return 2
    limit_entries = int(arguments[1]) if len(arguments) > 1 else 65536
    seconds = float(arguments[2]) if len(arguments) > 2 else 10.0
    # A core file would hold keys, and a fault is expected here.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The alarm ends a hang inside LMDB even where the process that waits for it was killed; its
    # mask is inherited.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        stream = read_environment(arguments[0], limit_entries=limit_entries)
    except (OSError, ValueError) as error:
        sys.stdout.write(ascii(str(error)))
        return 1
    sys.stdout.buffer.write(stream)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
