"""Opening a volume reads its file: where the disk does not answer, only the thread that opens it stands still.

The constructor of the core's Volume ran with the GIL: with reads that hang, the whole process stood, beyond the
deadlines of calls in other threads.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import sys, threading
from pathlib import Path
from store_kit import DISK_ONLY, Directories
from stepwell.store import PageStore
from stepwell.testing.faults import inject, wait_paused

config = Directories(Path(sys.argv[1]) / "shared", Path(sys.argv[1]) / "disk").config(**DISK_ONLY)
PageStore(config).close()  # makes a volume
with inject("file.pread", "pause"):
    opening = threading.Thread(target=lambda: PageStore(config).close())
    opening.start()
    wait_paused("file.pread")
    print("others run", flush=True)
opening.join()
print("opened", flush=True)
"""


def test_other_threads_run_while_a_volume_is_read_for_the_first_time(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.split("\n")[:2] == ["others run", "opened"], ended.stderr
