"""`midus look depth`: how much attention reads of earlier layers, and of which."""

from functools import partial
from typing import TYPE_CHECKING

from midus_hf.cli.look.request import QUESTIONS, READING, Request
from midus_hf.cli.look.usage import read_by
from midus_hf.cli.reading import sizes_of, token_bar

if TYPE_CHECKING:
    from midus_hf.analysis.answer import Answer

# Number of slots written by earlier layers that a terminal shows. JSON and the page have all.
_MOST_WRITERS = 10


@QUESTIONS.register(
    "depth", "what heads read of earlier layers (moda)", (*READING, "memory", "layers", "heads"), ("text",)
)
def depth(request: Request) -> "Answer":
    """Answer which share of attention goes to the depth, and which earlier layers are read.

    If the request names one layer and one head, the pictures also have a map: the share that each token of the longest row gives
    to each key and slot.
    """
    if len(request.documents) > 1:
        raise ValueError(f"{len(request.documents)} texts are given; expected one to read the depth with.")
    from midus_hf.analysis.answer import Answer
    from midus_hf.analysis.depth.map import depth_map
    from midus_hf.analysis.depth.pictures import depth_parts, draw_parts
    from midus_hf.analysis.depth.readers import readers_of_depth
    from midus_hf.analysis.depth.reading import depth_readings, writers
    from midus_hf.analysis.depth.records import record_depth
    from midus_hf.analysis.depth.report import HOW_TO_READ, as_json, layers_table, writers_table
    from midus_hf.analysis.text_rows import read_texts

    model, _ = request.loaded
    config = model.config.get_text_config()
    layers = request.numbers("layers", config.num_hidden_layers)
    heads = request.numbers("heads", config.num_attention_heads)
    readers_of_depth(model, request.memory, layers)
    (rows,) = request.text_rows
    of_head = None
    if layers is not None and heads is not None and len(layers) == len(heads) == 1:
        of_head = depth_map(model, rows.rows[0], layers[0], heads[0], request.memory)
    recording = record_depth(model, request.memory, layers=layers, heads=heads)
    with token_bar() as show, recording as records:
        losses = read_texts(model, [rows], batch_size=request.batch_size, progress=show)
    readings = depth_readings(records)
    written = writers(readings)
    texts = {rows.name: {**sizes_of(rows), "loss": losses[rows.name].mean}}
    parts = depth_parts(readings, of_head)
    return Answer(
        title="What heads read of the depth",
        summary=read_by(request.model, texts),
        report={"model": request.model, "texts": texts, **as_json(readings, written)},
        tables=[layers_table(readings), writers_table(written)],
        terminal_tables=[layers_table(readings), writers_table(written, _MOST_WRITERS)],
        paragraphs=[HOW_TO_READ],
        pictures={title: partial(draw_parts, [part]) for title, part in parts.items()},
    )
