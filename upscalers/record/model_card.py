"""Text and metadata of the model card of an upscaled checkpoint."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import yaml

from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import read_yaml, write_yaml
from midus_hf.files.cards import card_example, read_card
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.memories.registry import Memories
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.source import Source, check_repo_id
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import Method
from upscalers.plan import Plan
from upscalers.record.provenance import ParameterCounts
from upscalers.request import Progress, one_line
from upscalers.tensors.recipes import Measurement, summary_table

_ADAPTERS = [
    "An adapter, such as a LoRA, finds layers by their index. An adapter of the base does not fit this model, whose layers",
    "are numbered as above: PEFT would put it on the wrong ones. Merge it into the base before upscaling (`merge_and_unload`).",
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
    compared: bool,
) -> str:
    """Return the text of `README.md`: metadata, loading, parameters, layers, licence and citation."""
    base_name = base.label
    writes = auto_class == "AutoModelForCausalLM" and has_tokenizer(base.folder)
    # The card is kept when the model is trained, so the text must stay true.
    start = "It is meant to be trained: before that it is not guaranteed to compute the same as the base"
    if method.identity:
        start = "Before any training it computes exactly the same as the base"
        start += f" in {request['dtype']}" * (request["dtype"] != "auto")
        if method.identity_except is not None:
            start += f", but for {method.identity_except}"
        start += ", as the method promises" * (not compared)
    start += "." if compared else "; nothing was compared."
    described = [plan.describe(index, memories) for index in range(plan.num_layers)]
    rows = [
        f"| **{index}** | **{description}** |" if index in plan.new_indices else f"| {index} | {description} |"
        for index, description in enumerate(described)
    ]
    measured: list[str] = []
    if measurements:
        header, *lines = summary_table(
            measurements, with_seconds=False
        )  # so that the same request gives the same card
        lines = [header, ["---"] * len(header), *lines]
        told = "Mean over layers, with lowest and highest value; `upscale.json` has every layer."
        measured = [
            "## Measurements of the new layers",
            "",
            told,
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    paper, licence = method.paper, list[str]()
    if names := _words(carried.get("license_name") or carried.get("license")):
        links = "".join(f" ({link})" for link in _words(carried.get("license_link")))
        terms = f"That of the base, whose terms apply to this model too: {', '.join(names)}{links}."
        licence = ["## Licence", "", terms, ""]
    bank = (
        f"The checkpoint comes with a bank of {counts.bank or 0:,} parameters, of which each text fetches {counts.fetched or 0:,} "
        "by its path in a tree of topics: `model(input_ids, memory_ids=paths)`."
    )
    return "\n".join(
        [
            _front_matter(base, carried, ["midus-hf", method.name, "upscaled"]),
            "",
            f"# {base_name.rstrip('/').rsplit('/', 1)[-1]}, upscaled with {method.name}",
            "",
            f"{base_name} ({plan.num_base_layers} layers) {_change(plan, memories)}: {method.summary}.",
            start,
            "",
            *card_example(config["model_type"], auto_class, writes, repository),
            "",
            *(["## Know before use", "", *(f"- {concern}" for concern in concerns), ""] if concerns else []),
            "## Parameters",
            "",
            "| base | new | total | trained by the method |",
            "|---|---|---|---|",
            f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |",
            "",
            *([] if counts.bank is None else [bank, ""]),
            "## How it was made",
            "",
            "`upscale --config FILE --output DIR` makes it again from:"
            if "base" in request
            else f"`upscale --config FILE --base BASE --output DIR`, BASE being {base_name}, makes it again from:",
            "",
            "```yaml",
            f"{write_yaml(request, flow=None)}```",
            "",
            "## Layers",
            "",
            "| layer | from |",
            "|---|---|",
            *rows,
            "",
            *(_ADAPTERS if plan.renumbers else []),
            *measured,
            *licence,
            *(
                []
                if paper is None
                else ["## Cite", "", f"{paper.title} ({paper.reference}).", "", "```bibtex", paper.bibtex, "```", ""]
            ),
        ]
    )


def with_request(card: str, change: Callable[[Any], None]) -> str:
    """Change the request recorded in a card, if there is one."""
    found = re.search(r"```yaml\r?\n(.*?)```", card, re.DOTALL)
    if found is None:
        return card
    try:
        request = read_yaml(found[1], "the request of the card")
    except RequestError:  # of another author
        return card
    change(request)
    return f"{card[: found.start(1)]}{write_yaml(request, flow=None)}{card[found.end(1) :]}"


def _change(plan: Plan, memories: Memories) -> str:
    if not plan.new_memories:
        return f"as {plan.num_layers} layers, {len(plan.new_indices)} of them new"
    attached = [memories.attached[name] for name in plan.new_memories]
    return "with memory " + ", ".join(f"{entry.site} of {len(entry.layers)} of them" for entry in attached)


_LICENCE_KEYS = ("license", "license_name", "license_link")


def base_metadata(base: Source, progress: Progress) -> dict[str, Any]:
    """Return licence, languages and base model from the base's model card, for `ModelCardData`."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, ModelCard

    try:
        text = (read_card(base.folder) or "").removeprefix("\ufeff")
        if not REGEX_YAML_BLOCK.search(text):
            return {}
        card = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        progress.warn(
            f"the metadata of the base's model card cannot be read ({one_line(error)}); its licence and languages are "
            f"not carried over. Add them to {CARD_FILE} of the output."
        )
        return {}
    carried = {key: _words(card.get(key)) for key in (*_LICENCE_KEYS, "language", "base_model")}
    carried["license_link"] = [
        link
        if base.revision is None or urlsplit(link).scheme or (base.folder / link).is_file()
        else f"https://huggingface.co/{base.label}/blob/{base.revision}/{link.removeprefix('./')}"
        for link in carried["license_link"]
    ]
    carried["base_model"] = [name for name in carried["base_model"] if _is_hub_id(name)]
    # The hub takes lists for some keys only.
    return {key: texts if len(texts) > 1 else texts[0] for key, texts in carried.items() if texts}


def _front_matter(base: Source, carried: dict[str, Any], tags: list[str]) -> str:
    from huggingface_hub import ModelCardData

    base_model = base.label if base.revision is not None else carried.get("base_model")
    known: dict[str, Any] = {key: carried.get(key) for key in ("language", *_LICENCE_KEYS)}
    data = ModelCardData(
        **known,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        # Of the hub's relations (adapter, finetune, merge, quantized), finetune is the one that changes weights.
        base_model_relation="finetune" if base_model else None,
        tags=tags,
    )
    return f"---\n{data.to_yaml()}\n---"


def _words(value: Any) -> list[str]:
    """Return the texts of a text or a list; `no`, Norwegian, is restored, which YAML reads as false."""
    entries = value if isinstance(value, list) else [value]
    texts = ["no" if entry is False else entry for entry in entries]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _is_hub_id(name: str) -> bool:
    try:
        check_repo_id(name)
    except RequestError:
        return False
    return True
