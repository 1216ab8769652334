"""Metadata of a model card: what still holds of the base's card, and what is new."""

from typing import Any
from urllib.parse import urlsplit

import yaml

from midus_hf.files.checkpoint_files import CARD_FILE
from upscalers.checkpoint.hub import check_repo_id
from upscalers.checkpoint.source import Source
from upscalers.request.errors import RequestError, one_line
from upscalers.request.progress import Progress

_LICENCE_KEYS = ("license", "license_name", "license_link")
# Tags for file formats and runtimes of a model, which a new checkpoint does not inherit.
_FORMATS_AND_RUNTIMES = frozenset(
    {
        "4-bit", "8-bit", "autotrain_compatible", "awq", "coreml", "custom_code", "endpoints_compatible", "exl2", "flax",
        "ggml", "gguf", "gptq", "jax", "llama-cpp", "llama.cpp", "mistral-common", "mlx", "onnx", "openvino", "pytorch",
        "quantized", "rust", "safetensors", "tensorflow", "text-generation-inference", "tf", "tgi", "transformers", "vllm",
    }
)  # fmt: skip


def base_metadata(base: Source, progress: Progress) -> dict[str, Any]:
    """Return the licence, languages, tags and own base that the base's model card names.

    Args:
        base: A base with or without a card. A card that cannot be read gives an empty result and a warning.
        progress: Display that shows the warning.

    Returns:
        The values of `license`, `license_name`, `license_link`, `language`, `tags` and `base_model` that the card has,
        by these names, as `ModelCardData` takes them.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, ModelCard

    path = base.folder / CARD_FILE
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not REGEX_YAML_BLOCK.search(text):
            return {}
        card = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        progress.warn(
            f"the metadata of the base's model card cannot be read ({one_line(error)}); its licence and languages are "
            f"not carried over. Add them to {CARD_FILE} of the output."
        )
        return {}
    carried = {key: _words(card.get(key)) for key in (*_LICENCE_KEYS, "language", "tags", "base_model")}
    carried["license_link"] = [_absolute_link(link, base) for link in carried["license_link"]]
    carried["base_model"] = [name for name in carried["base_model"] if _is_hub_id(name)]
    carried["tags"] = [tag for tag in carried["tags"] if tag.lower() not in _FORMATS_AND_RUNTIMES and ":" not in tag]
    # A single entry is not wrapped in a list: the hub takes lists for some keys only.
    return {key: texts if len(texts) > 1 or key == "tags" else texts[0] for key, texts in carried.items() if texts}


def front_matter(base: Source, carried: dict[str, Any], tags: list[str]) -> str:
    """Return the YAML block at the top of an upscaled model's card, between its `---` lines.

    Args:
        base: The base. A hub repository is named as the base model; for a local base, the base models that its card
            names are used.
        carried: Metadata from `base_metadata`.
        tags: New tags, put in front of the base's.
    """
    from huggingface_hub import ModelCardData

    base_model = base.label if base.revision is not None else carried.get("base_model")
    data = ModelCardData(
        language=carried.get("language"),
        license=carried.get("license"),
        license_name=carried.get("license_name"),
        license_link=carried.get("license_link"),
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        # The hub knows four relations (adapter, finetune, merge, quantized); finetune is the one that changes weights.
        base_model_relation="finetune" if base_model else None,
        tags=[*tags, *carried.get("tags", [])],
    )
    return f"---\n{data.to_yaml()}\n---"


def licence_section(carried: dict[str, Any]) -> list[str]:
    """Return the lines of a card that name the licence; none if the base's card names none."""
    names = _words(carried.get("license_name") or carried.get("license"))
    if not names:
        return []
    links = "".join(f" ({link})" for link in _words(carried.get("license_link")))
    return ["## Licence", "", f"That of the base, whose terms hold for this model too: {', '.join(names)}{links}.", ""]


def _words(value: Any) -> list[str]:
    """Return the texts of a text or a list, without blank ones; `no`, Norwegian, is restored, which YAML reads as false."""
    entries = value if isinstance(value, list) else [value]
    texts = ["no" if entry is False else entry for entry in entries]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _absolute_link(link: str, base: Source) -> str:
    """Return a link to a file that stays in the base's repository as an absolute address; other links unchanged."""
    if base.revision is None or urlsplit(link).scheme or (base.folder / link).is_file():
        return link
    return f"https://huggingface.co/{base.label}/blob/{base.revision}/{link.removeprefix('./')}"


def _is_hub_id(name: str) -> bool:
    try:
        check_repo_id(name)
    except RequestError:
        return False
    return True
