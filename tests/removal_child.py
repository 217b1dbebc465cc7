"""Remove orphans in processes of their own, for each line of JSON `{"path": ..., "kill": n}`; answer when it is done.

kill: the removal is killed at its n-th call of the file layer; 0: it is not.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from stepwell import removal
from stepwell.testing.faults import inject


def collect(path: str, nth: int) -> None:
    """Plan, remove, and end with a line of what was removed."""
    selection = removal.Selection(orphans=True)
    with inject("file.*", "kill" if nth else "count", nth=nth):
        removed = removal.remove(removal.plan_removal(path, selection))
    os.write(1, json.dumps(asdict(removed)).encode() + b"\n")


def main() -> None:
    """Fork a process for each order: it has no threads and nothing open."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                collect(order["path"], order["kill"])
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0:
            os.write(1, json.dumps({"code": code}).encode() + b"\n")


if __name__ == "__main__":
    main()
