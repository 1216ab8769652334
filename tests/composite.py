"""Tiny models that read pictures and hold a language model, and a picture with text for each of them."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from scripts.anatomy.tiny import composite_class_of, tiny_config

_PICTURE, _BEGIN, _END, _VIDEO = 90, 91, 92, 93
_TOWER = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_PATCHED = {**_TOWER, "image_size": 28, "patch_size": 14}
_QWEN_TOWER = {
    **{"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32},
    **{"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64},
}
_QWEN_IDS = {"vision_start_token_id": _BEGIN, "vision_end_token_id": _END, "video_token_id": _VIDEO}
_GEMMA4_TOWER = {**_TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
_GEMMA4_TOWER["position_embedding_size"] = 64
# For each type: values of its vision tower's config, and of its own.
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (_PATCHED, {"image_token_index": _PICTURE, "mm_tokens_per_image": 4}),
    "gemma4": (_GEMMA4_TOWER, {"image_token_id": _PICTURE}),
    "llama4": (
        {
            **{**_PATCHED, "intermediate_size": 128, "image_size": 56, "pixel_shuffle_ratio": 0.5},
            **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
        {"image_token_index": _PICTURE},
    ),
    "llava": ({**_PATCHED, "projection_dim": 32}, {"image_token_index": _PICTURE}),
    "mistral3": ({**_PATCHED, "image_size": 56, "head_dim": 8}, {"image_token_index": _PICTURE}),
    "qwen3_5": (_QWEN_TOWER, {"image_token_id": _PICTURE, **_QWEN_IDS}),
}
# In 5.24.0 the forward of llama4 itself raises, with and without pictures: its output asks the language model's for `image_outputs`.
TYPES = tuple(name for name in _SIZES if name != "llama4" or not transformers.__version__.startswith("5.24."))


def composite_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a tiny random model that reads pictures, in eval mode; `changes` are of its language model."""
    tower, own = _SIZES[model_type]
    config_class = CONFIG_MAPPING[model_type]
    language = tiny_config(config_class().get_text_config().model_type, **changes).to_dict()
    config = config_class(text_config=language, vision_config={**_vision_type(config_class), **tower}, **own)
    torch.manual_seed(0)
    model = composite_class_of(config_class)._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():  # where they start, some hide the picture
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _vision_type(config_class: Any) -> dict[str, Any]:
    vision = config_class().vision_config
    return {} if vision is None else {"model_type": vision.model_type}


@cache
def picture_with_text(model_type: str) -> dict[str, torch.Tensor]:
    """Return the inputs for a random picture, with text before and after it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[3, _BEGIN, *[_PICTURE] * 4, _END, 5, 6, 7, 8, 9]])
    kinds = (ids == _PICTURE).long()
    if model_type == "qwen3_5":
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        of_picture = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kinds}
    elif model_type == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).reshape(1, 36, 2)
        pixels = torch.rand(1, 36, 3 * 4 * 4, generator=generator)
        of_picture = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
    else:
        size = 56 if model_type in ("llama4", "mistral3") else 28
        of_picture = {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}
        if model_type == "mistral3":
            of_picture["image_sizes"] = torch.tensor([[size, size]])
        if model_type == "gemma3":
            of_picture["token_type_ids"] = kinds
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **of_picture}
