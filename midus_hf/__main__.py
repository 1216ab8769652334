"""`python -m midus_hf COMMAND ...`: the commands of `midus`, and `upscale`, in this Python environment, without their scripts."""

import sys

from midus_hf.cli import entry_points

if __name__ == "__main__":
    if sys.argv[1:2] == ["upscale"]:
        sys.exit(entry_points.start("upscale", "upscale", sys.argv[2:]))
    sys.exit(entry_points.midus())
