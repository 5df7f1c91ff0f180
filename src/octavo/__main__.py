"""``python -m octavo`` is the ``octavo`` command."""

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main())
