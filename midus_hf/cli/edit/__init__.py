"""`midus edit`: change what the memories of a checkpoint hold."""

from functools import partial

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.edit import blocks, chapters
from upscalers.request.errors import RequestError

app = command_line("Change what the memories of a checkpoint hold. The checkpoint that is read stays as it is.")
app.add_typer(chapters.app, name="chapters")
app.add_typer(blocks.app, name="blocks")

main = partial(
    run_command,
    app,
    name="midus edit",
    refusals=(RequestError,),
    interruption="interrupted; nothing is left of the output.",
)
