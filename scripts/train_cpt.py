"""`midus train` as a script, for `torchrun` and `accelerate launch`: `python scripts/train_cpt.py CONFIG.yaml [key=value ...]`."""

import sys

from midus_hf.cli.train import main

if __name__ == "__main__":
    sys.exit(main(name="train_cpt.py"))
