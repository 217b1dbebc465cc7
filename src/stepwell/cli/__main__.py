"""Let `python -m stepwell.cli` do what `stepwell` does."""

import sys

from stepwell.cli import main

sys.exit(main())
