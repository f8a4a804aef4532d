"""`python -m moediag` is `moediag`."""

import sys

from moediag.cli import main

if __name__ == "__main__":
    sys.exit(main())
