"""`python -m asyncrl`: the same as the `asyncrl` command."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
