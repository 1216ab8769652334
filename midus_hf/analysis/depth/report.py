"""Results about attention to the depth as tables of words and as JSON."""

from collections.abc import Sequence
from typing import Any

from midus_hf.analysis.depth.reading import DepthReading, WriterReading
from midus_hf.analysis.table_of_words import TableOfWords

# Number of slots per layer that the table names.
_MOST_SLOTS = 3

HOW_TO_READ = (
    "A head reads keys of the sequence and slots of the depth. The share of a key or slot is the weight that the head multiplies its "
    "value with, the gate included, averaged over tokens. Shares tell what is read, and not what is added: a slot whose value is "
    "short, or that the output projection leaves out, adds little."
)


def layers_table(readings: Sequence[DepthReading]) -> TableOfWords:
    """Return a table of what each layer reads of the depth: the shares per kind of slot, and the slots that are read most."""
    sources = list(dict.fromkeys(slot.source for reading in readings for slot in reading.slots))
    rows = []
    for reading in readings:
        head, share = reading.most_depth
        by_slot = sorted(zip(reading.mean_shares, map(str, reading.slots), strict=True), key=lambda pair: -pair[0])
        rows.append(
            [
                str(reading.layer),
                f"{reading.mean_depth_share:.1%}",
                f"{share:.1%} ({head})",
                f"{reading.mean_sequence_share:.1%}",
                f"{min(reading.gates):.3g} to {max(reading.gates):.3g}",
                *(f"{reading.share_of_source(source):.1%}" for source in sources),
                ", ".join(f"{slot} {share:.1%}" for share, slot in by_slot[:_MOST_SLOTS] if share) or "nothing",
            ]
        )
    head_row = ["layer", "depth", "largest (head)", "sequence", "gate", *sources, "reads most"]
    return TableOfWords("Shares of the depth and of the sequence, the mean over tokens and heads", head_row, rows)


def writers_table(slot_readings: Sequence[WriterReading], most: int | None = None) -> TableOfWords:
    """Return a table of the slots that later layers read most, `most` at most. Default: all slots."""
    rows = [
        [
            str(writer.slot),
            str(writer.readers),
            f"{writer.mean_share:.2%}",
            f"{writer.most_share:.2%} ({writer.most_layer})",
        ]
        for writer in slot_readings[:most]
    ]
    return TableOfWords("Slots that are read most", ["slot", "layers", "share", "largest (layer)"], rows)


def as_json(readings: Sequence[DepthReading], slot_readings: Sequence[WriterReading]) -> dict[str, Any]:
    """Return everything in both kinds of readings as dictionaries and lists for JSON."""
    return {
        "layers": [
            {
                "layer": reading.layer,
                "memory": reading.memory,
                "tokens": reading.tokens,
                "heads": list(reading.heads),
                "gates": reading.gates,
                "depth_shares": reading.depth_shares,
                "sequence_shares": reading.sequence_shares,
                "slots": [slot._asdict() for slot in reading.slots],
                "shares": reading.shares,
            }
            for reading in readings
        ],
        "writers": [
            {
                **writer.slot._asdict(),
                "readers": writer.readers,
                "mean_share": writer.mean_share,
                "most_layer": writer.most_layer,
                "most_share": writer.most_share,
            }
            for writer in slot_readings
        ],
    }
