"""`python -m sennit` is the command `sennit`."""

import sys

from sennit.cli import main

if __name__ == "__main__":
    sys.exit(main())
