"""Which memory slots a model retrieves as it reads a text: `python scripts/memory_usage.py MODEL --text FILE`."""

import sys

from midus_commands.usage import main

if __name__ == "__main__":
    sys.exit(main())
