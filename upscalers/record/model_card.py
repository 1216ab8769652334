"""Text and metadata of the model card of an upscaled checkpoint."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import yaml

from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import read_yaml, write_yaml
from midus_hf.files.cards import card_example, read_card
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.memories.registry import Memories
from upscalers.checkpoint.source import Source, check_repo_id
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import Paper
from upscalers.plan import Plan
from upscalers.record.provenance import Done
from upscalers.request import Progress, one_line
from upscalers.tensors.recipes import Measurement, summary_table
from upscalers.upscaling import Upscaling

_ADAPTERS = [
    "An adapter, such as a LoRA, finds layers by their index. An adapter of the base does not fit this model, whose layers",
    "are numbered as above: PEFT would put it on the wrong ones. Merge it into the base before upscaling (`merge_and_unload`).",
    "",
]


def model_card(upscaling: Upscaling, done: Done, carried: Mapping[str, Any], repository: str | None) -> str:
    """Return the text of `README.md`: metadata, loading, parameters, layers, licence and citation.

    Args:
        upscaling: What was decided.
        done: What became of it.
        carried: Metadata of the base's card, as `base_metadata` returns them.
        repository: Where the result will be on the Hub; None if it is not uploaded.
    """
    method = upscaling.method
    plan = upscaling.plan
    counts = upscaling.counts
    base_name = upscaling.source.label
    auto_class = upscaling.base.auto_class
    writes = auto_class == "AutoModelForCausalLM" and has_tokenizer(upscaling.source.folder)
    memories = upscaling.layout.memories
    warnings = [f"- {warning}" for warning in upscaling.warnings]
    bank = (
        f"The checkpoint comes with a bank of {counts.bank or 0:,} parameters, of which each text fetches {counts.fetched or 0:,} "
        "by its path in a tree of topics: `model(input_ids, memory_ids=paths)`."
    )
    recipe = upscaling.recipe()
    command = f"`upscale --config FILE --base BASE --output DIR`, BASE being {base_name}, makes it again from:"
    if "base" in recipe:
        command = "`upscale --config FILE --output DIR` makes it again from:"
    return "\n".join(
        [
            _front_matter(upscaling.source, carried, ["midus-hf", method.name, "upscaled"]),
            "",
            f"# {base_name.rstrip('/').rsplit('/', 1)[-1]}, upscaled with {method.name}",
            "",
            f"{base_name} ({plan.num_base_layers} layers) {_change(plan, memories)}: {method.summary}.",
            _promise(upscaling, done),
            "",
            *card_example(upscaling.config["model_type"], auto_class, writes, repository),
            "",
            *(["## Know before use", "", *warnings, ""] if warnings else []),
            "## Parameters",
            "",
            "| base | new | total | trained by the method |",
            "|---|---|---|---|",
            f"| {counts.base:,} | {counts.new:,} | {counts.total:,} | {counts.trainable:,} |",
            "",
            *([] if counts.bank is None else [bank, ""]),
            "## How it was made",
            "",
            command,
            "",
            "```yaml",
            f"{write_yaml(recipe, flow=None)}```",
            "",
            "## Layers",
            "",
            "| layer | from |",
            "|---|---|",
            *_layer_rows(plan, memories),
            "",
            *(_ADAPTERS if plan.renumbers else []),
            *_measured(done.measurements),
            *_licence(carried),
            *_citation(method.paper),
        ]
    )


def _promise(upscaling: Upscaling, done: Done) -> str:
    """Return what the result computes before training; the card is kept after it, so the text must stay true."""
    method = upscaling.method
    dtype = upscaling.request.dtype
    is_compared = done.identity.checked is not None
    text = "It is meant to be trained: before that it is not guaranteed to compute the same as the base"
    if method.identity:
        text = "Before any training it computes exactly the same as the base"
        if dtype != "auto":
            text += f" in {dtype}"
        if method.identity_except is not None:
            text += f", but for {method.identity_except}"
        if not is_compared:
            text += ", as the method promises"
    return f"{text}." if is_compared else f"{text}; nothing was compared."


def _layer_rows(plan: Plan, memories: Memories) -> list[str]:
    rows = []
    for index in range(plan.num_layers):
        described = plan.describe(index, memories)
        rows.append(
            f"| **{index}** | **{described}** |" if index in plan.new_indices else f"| {index} | {described} |"
        )
    return rows


def _measured(measurements: Sequence[Measurement]) -> list[str]:
    if not measurements:
        return []
    header, *rows = summary_table(measurements, with_seconds=False)  # so that the same request gives the same card
    return [
        "## Measurements of the new layers",
        "",
        "Mean over layers, with lowest and highest value; `upscale.json` has every layer.",
        "",
        *(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)),
        "",
    ]


def _licence(carried: Mapping[str, Any]) -> list[str]:
    names = _words(carried.get("license_name") or carried.get("license"))
    if not names:
        return []
    links = "".join(f" ({link})" for link in _words(carried.get("license_link")))
    terms = f"That of the base, whose terms apply to this model too: {', '.join(names)}{links}."
    return ["## Licence", "", terms, ""]


def _citation(paper: Paper | None) -> list[str]:
    if paper is None:
        return []
    return ["## Cite", "", f"{paper.title} ({paper.reference}).", "", "```bibtex", paper.bibtex, "```", ""]


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


def _front_matter(base: Source, carried: Mapping[str, Any], tags: list[str]) -> str:
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
