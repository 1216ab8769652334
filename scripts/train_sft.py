"""`midus sft` as a script, for `accelerate launch`: `python scripts/train_sft.py CONFIG.yaml [key=value ...]`."""

import sys

from midus_hf.cli.sft import main

if __name__ == "__main__":
    sys.exit(main(name="train_sft.py"))
