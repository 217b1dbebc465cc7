"""A SIGBUS handler installed by signal.signal() after the store had opened made a fault, and then close(), last for
ever.

Python's handler only notes the signal and returns to the access, which faults again. Volumes left their mappings for
pread only
with the keeper's next round.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from store_kit import Directories

PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_kit import Directories, Rig, chain
rig = Rig(Directories(Path(sys.argv[1]), Path("/nowhere")).config(disk=0))
rig.save(chain(1, 12))
signal.signal(signal.SIGBUS, lambda *_: None)
[volume] = Path(sys.argv[1]).glob("v-*.vol")
os.truncate(volume, 8192)
assert rig.load(chain(1, 12)) == 0
rig.store.clear()
rig.close()
"""


def test_a_fault_under_a_handler_of_python_ends(directories: Directories) -> None:
    command = [sys.executable, "-c", PROGRAM, str(directories.shared), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
