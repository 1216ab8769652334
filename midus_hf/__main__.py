"""`python -m midus_hf COMMAND` runs `midus COMMAND`, for launchers: `torchrun -m midus_hf train ...`, `accelerate launch -m ...`."""

import sys

from midus_hf.cli.entry_points import midus

if __name__ == "__main__":
    sys.exit(midus())
