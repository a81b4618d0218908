"""`python -m prorsa.cli` is the `prorsa` command."""

import sys

from prorsa.cli import main

sys.exit(main())
