"""``python -m nbverify``: the command line, see cli.py."""

import sys

from nbverify.cli import main

if __name__ == "__main__":
    sys.exit(main())
