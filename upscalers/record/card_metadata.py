"""The metadata of a model card: what the base's card says that still holds, and what is new."""

from typing import Any
from urllib.parse import urlsplit

import yaml

from midus_hf.files.checkpoint_files import CARD_FILE
from upscalers.checkpoint.hub import check_repo_id
from upscalers.checkpoint.source import Source
from upscalers.request.errors import RequestError, one_line
from upscalers.request.progress import Progress

_LICENCE_KEYS = ("license", "license_name", "license_link")
_FORMATS_AND_RUNTIMES = frozenset(
    {
        "4-bit", "8-bit", "autotrain_compatible", "awq", "coreml", "custom_code", "endpoints_compatible", "exl2", "flax",
        "ggml", "gguf", "gptq", "jax", "llama-cpp", "llama.cpp", "mistral-common", "mlx", "onnx", "openvino", "pytorch",
        "quantized", "rust", "safetensors", "tensorflow", "text-generation-inference", "tf", "tgi", "transformers", "vllm",
    }
)  # fmt: skip
"""Tags that tell in which files a model comes and what runs it, which a new checkpoint does not inherit."""


def base_metadata(base: Source, progress: Progress) -> dict[str, Any]:
    """What the base's model card says of its licence, languages, tags and own base.

    Args:
        base: With or without a card. One that cannot be read is passed over with a warning.
        progress: Told of the warning.

    Returns:
        Of `license`, `license_name`, `license_link`, `language`, `tags` and `base_model` those that the card has, as
        `ModelCardData` takes them.
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
    # One word stays one word: the hub takes lists for some keys only.
    return {key: words if len(words) > 1 or key == "tags" else words[0] for key, words in carried.items() if words}


def front_matter(base: Source, carried: dict[str, Any], tags: list[str]) -> str:
    """The YAML block of an upscaled model's card, between its rules.

    Args:
        base: A hub repository is named as the base; for a folder, what its own card names.
        carried: From `base_metadata`.
        tags: The new ones.
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
        # Of the four relations that the hub knows (adapter, finetune, merge, quantized) the one that changes weights.
        base_model_relation="finetune" if base_model else None,
        tags=[*tags, *carried.get("tags", [])],
    )
    return f"---\n{data.to_yaml()}\n---"


def licence_section(carried: dict[str, Any]) -> list[str]:
    """The lines of a card that say which licence holds; none where the base's card names none."""
    names = _words(carried.get("license_name") or carried.get("license"))
    if not names:
        return []
    links = "".join(f" ({link})" for link in _words(carried.get("license_link")))
    return ["## Licence", "", f"That of the base, whose terms hold for this model too: {', '.join(names)}{links}.", ""]


def _words(value: Any) -> list[str]:
    """A text or a list of texts as a list. YAML takes Norwegian's code, no, for false."""
    entries = value if isinstance(value, list) else [value]
    words = ["no" if entry is False else entry for entry in entries]
    return [word.strip() for word in words if isinstance(word, str) and word.strip()]


def _absolute_link(link: str, base: Source) -> str:
    """A link to a file of the base's repository that does not travel, as it is found from elsewhere; others as they are."""
    if base.revision is None or urlsplit(link).scheme or (base.folder / link).is_file():
        return link
    return f"https://huggingface.co/{base.label}/blob/{base.revision}/{link.removeprefix('./')}"


def _is_hub_id(name: str) -> bool:
    try:
        check_repo_id(name)
    except RequestError:
        return False
    return True
