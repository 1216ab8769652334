"""`midus look usage` as a script: `python scripts/memory_usage.py MODEL --text FILE`."""

import sys

from midus_hf.cli.look import main

if __name__ == "__main__":
    sys.exit(main(["usage", *sys.argv[1:]]))
