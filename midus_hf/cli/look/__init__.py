"""`midus look`: what the memories of a model read, do and hold, and what has changed."""

from functools import partial

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.look import chapters, depth, inside, usage
from midus_hf.cli.reading import sharing_options

app = command_line("Look into models: what their memories read, do and hold, and what has changed.")
for _command in (
    usage.usage,
    depth.depth,
    chapters.chapters,
    inside.blocks,
    inside.layers,
    chapters.ablate,
    inside.heads,
    inside.values,
    chapters.nearest,
    inside.drift,
    inside.page,
):
    app.command()(sharing_options(_command))

main = partial(run_command, app, name="midus look")
