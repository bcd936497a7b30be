"""``python -m shardcast`` is the ``shardcast`` command."""

import sys

from shardcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
