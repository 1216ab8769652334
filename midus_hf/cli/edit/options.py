"""Options that commands share which write an edited checkpoint."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A checkpoint that upscale made; it stays as it is.", metavar="DIR")]
Output = Annotated[str, typer.Option(help="Folder to make.", metavar="DIR2")]
Memory = Annotated[str | None, typer.Option(help="One of several memories.  [default: the only one]", metavar="NAME")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what upscale or this command wrote there.")]
