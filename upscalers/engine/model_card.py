"""The model card of an upscaled checkpoint."""

import json
from typing import Any

from upscalers.engine.families import Config
from upscalers.engine.method import Method
from upscalers.engine.plan import Base, Plan
from upscalers.engine.report import ParameterCounts


def model_card(
    method: Method, base_name: str, plan: Plan, config: Config, counts: ParameterCounts, request: dict[str, Any]
) -> str:
    """The text of `README.md`: front matter, how to load it, the plan as a table, the counts, what to cite."""
    is_hub_id = base_name.count("/") == 1 and not base_name.startswith((".", "/", "~"))
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if is_hub_id:
        front += [f"base_model: {base_name}"]
    front += ["tags:", "- midus-hf", f"- {method.name}", "- upscaled", "---", ""]
    needs_code = config["model_type"].startswith("midus_")
    load = "AutoModelForCausalLM.from_pretrained(PATH" + (", trust_remote_code=True)" if needs_code else ")")
    start = (
        "It computes exactly what the base computes until it is trained."
        if method.identity
        else "It does not compute what the base computes: it is meant to be trained first."
    )
    rows = [
        f"| {index} | base {layer.index} |"
        if isinstance(layer, Base)
        else f"| **{index}** | **new**, between base {_or_end(layer.previous)} and {_or_end(layer.next)} |"
        for index, layer in enumerate(plan.layers)
    ]
    return "\n".join(
        [
            *front,
            f"# {base_name.rstrip('/').rsplit('/', 1)[-1]}, upscaled with {method.name}",
            "",
            f"{len(plan.new_indices)} new layers were inserted into {base_name} ({plan.num_base_layers} layers): {method.summary}.",
            start,
            "",
            "```python",
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = {load}",
            "```",
            "",
            "## Parameters",
            "",
            "| base | new | total | trained by the method |",
            "|---|---|---|---|",
            f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |",
            "",
            "## How it was made",
            "",
            "```json",
            json.dumps(request, indent=2),
            "```",
            "",
            "## Layers",
            "",
            "| layer | from |",
            "|---|---|",
            *rows,
            "",
            "## Cite",
            "",
            f"{method.paper.title} ({method.paper.reference}).",
            "",
            "```bibtex",
            method.paper.bibtex,
            "```",
            "",
        ]
    )


def _or_end(index: int | None) -> str:
    return "the edge" if index is None else str(index)
