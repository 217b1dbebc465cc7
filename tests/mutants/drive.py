"""Run the driver of stepwell.testing until it finds something, and say after how many steps: without shrinking that.

python tests/mutants/drive.py SEED STEPS        the run that `python -m stepwell.testing --seed SEED --steps STEPS` does
"""

from __future__ import annotations

import logging
import sys

from stepwell.testing.driver import Failure, Totals, episode


def main(seed: int, steps: int) -> int:
    """Returns: 1 where something was found, else 0."""
    logging.disable(logging.ERROR)  # what the stores say of the failures that they are given
    totals = Totals()
    while totals.steps < steps:
        before = totals.steps + totals.idle
        try:
            episode(seed, totals.episodes, totals)
        except Failure as failure:
            print(f"{failure}\nfound after {before + len(failure.steps) - 1} steps, {totals.episodes + 1} episodes")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
