"""The model card of an upscaled checkpoint."""

from typing import Any

import yaml

from upscalers.engine.families import Config
from upscalers.engine.method import Method
from upscalers.engine.plan import Base, Plan
from upscalers.engine.report import ParameterCounts
from upscalers.engine.source import Source


def model_card(
    method: Method, base: Source, plan: Plan, config: Config, counts: ParameterCounts, request: dict[str, Any]
) -> str:
    """The text of `README.md`: front matter, how to load it, the plan as a table, the counts, what to cite."""
    base_name = base.label
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base.revision is not None:
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
        f"| {index} | base {layer.index} |" if isinstance(layer, Base) else f"| **{index}** | **new**, {layer.place} |"
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
            "`upscale --config FILE --output DIR` makes it again from:",
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
