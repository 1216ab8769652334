"""`midus train` as a file, for tests that start one file in every process."""

import sys

from midus_hf.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
