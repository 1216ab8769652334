"""Text of the model card of an upscaled checkpoint."""

from collections.abc import Sequence
from typing import Any

import yaml

from midus_hf.config.memory_entries import Memories
from upscalers.architecture.family import Config
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method
from upscalers.plan.describe import describe_layer
from upscalers.plan.plan import Plan
from upscalers.record.card_metadata import front_matter, licence_section
from upscalers.record.report import ParameterCounts
from upscalers.tensors.measurements import summary_table
from upscalers.tensors.solver import Measurement

_ADAPTERS = [
    "An adapter, such as a LoRA, finds layers by their number. One that was made for the base does not fit this model, whose layers",
    "are numbered as above: PEFT would put it on the wrong ones. `upscale adapter ADAPTER --onto DIR` writes it for this model.",
    "",
]


def model_card(
    method: Method,
    base: Source,
    plan: Plan,
    config: Config,
    memories: Memories,
    counts: ParameterCounts,
    request: dict[str, Any],
    concerns: Sequence[str],
    measurements: Sequence[Measurement],
    carried: dict[str, Any],
    auto_class: str,
    repository: str | None,
) -> str:
    """Return the text of `README.md`.

    The text has metadata, how to load the model, what to know before use, the parameter counts, how to make the model
    again, the plan as a table, measurements, the licence, and what to cite.

    Args:
        method: The method that upscaled the base.
        base: Source of the base.
        plan: The layer plan.
        config: Config of the upscaled model.
        memories: Memories of the upscaled model.
        counts: Parameter counts of base and result.
        request: The recipe that makes the model again.
        concerns: What a person should know about the result: the warnings of the run.
        measurements: What solvers measured about the tensors they made.
        carried: What still holds of the base's metadata, from `base_metadata`.
        auto_class: Name of the class of transformers that loads the model.
        repository: Repository that the model will be uploaded to; None if unknown. The output folder is never named,
            so that the same request gives the same bytes wherever the output lies.
    """
    base_name = base.label
    needs_code = config["model_type"].startswith("midus_")
    path = "PATH" if repository is None else f'"{repository}"'
    load = f"{auto_class}.from_pretrained({path}" + (", trust_remote_code=True)" if needs_code else ")")
    start = (
        "It computes exactly what the base computes until it is trained."
        if method.promises_identity
        else "It is not promised to compute what the base computes: it is meant to be trained first."
    )
    described = [describe_layer(plan, memories, index) for index in range(plan.num_layers)]
    rows = [
        f"| **{index}** | **{description}** |" if index in plan.new_indices else f"| {index} | {description} |"
        for index, description in enumerate(described)
    ]
    measured = _measured(measurements) if measurements else []
    return "\n".join(
        [
            front_matter(base, carried, ["midus-hf", method.name, "upscaled"]),
            "",
            f"# {base_name.rstrip('/').rsplit('/', 1)[-1]}, upscaled with {method.name}",
            "",
            f"{base_name} ({plan.num_base_layers} layers) {_change(plan, memories)}: {method.summary}.",
            start,
            "",
            "```python",
            f"from transformers import {auto_class}",
            "",
            *(['PATH = "."  # the folder that this file lies in'] if repository is None else []),
            f"model = {load}",
            "```",
            "",
            *(["## Know before use", "", *(f"- {concern}" for concern in concerns), ""] if concerns else []),
            "## Parameters",
            "",
            "| base | new | total | trained by the method |",
            "|---|---|---|---|",
            f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |",
            "",
            *_bank(counts),
            "## How it was made",
            "",
            "`upscale --config FILE --output DIR` makes it again from:"
            if "base" in request
            else f"`upscale --config FILE --base BASE --output DIR`, BASE being {base_name}, makes it again from:",
            "",
            "```yaml",
            yaml.safe_dump(request, sort_keys=False, default_flow_style=None).rstrip(),
            "```",
            "",
            "## Layers",
            "",
            "| layer | from |",
            "|---|---|",
            *rows,
            "",
            *(_ADAPTERS if plan.renumbers else []),
            *measured,
            *licence_section(carried),
            *_citation(method),
        ]
    )


def _change(plan: Plan, memories: Memories) -> str:
    if not plan.new_memories:
        return f"as {plan.num_layers} layers, {len(plan.new_indices)} of them new"
    attached = [memories.attached[name] for name in plan.new_memories]
    return "with memory " + ", ".join(f"{entry.site} of {len(entry.layers)} of them" for entry in attached)


def _bank(counts: ParameterCounts) -> list[str]:
    if counts.bank is None:
        return []
    return [
        f"Beside the checkpoint lies a bank of {counts.bank:,} parameters, of which each text fetches {counts.fetched:,} by its path "
        "in a tree of topics: `model(input_ids, memory_ids=paths)`.",
        "",
    ]


def _measured(measurements: Sequence[Measurement]) -> list[str]:
    header, *rows = summary_table(measurements, with_seconds=False)  # so that the same request gives the same card
    lines = [header, ["---"] * len(header), *rows]
    return [
        "## What was measured while making the new layers",
        "",
        "Mean over layers, and lowest to highest; `upscale.json` has every layer.",
        "",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
    ]


def _citation(method: Method) -> list[str]:
    if method.paper is None:
        return []
    return [
        "## Cite",
        "",
        f"{method.paper.title} ({method.paper.reference}).",
        "",
        "```bibtex",
        method.paper.bibtex,
        "```",
        "",
    ]
