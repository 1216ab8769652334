"""The `config.json` of three published models, as far as it decides names and shapes of tensors."""

import json
from pathlib import Path

LLAMA_3_2_1B = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "rope_theta": 500000.0},
    **{"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256},
    **{"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8},
    **{"tie_word_embeddings": True, "max_position_embeddings": 131072},
}  # fmt: skip
LLAMA_3_2_3B = LLAMA_3_2_1B | {
    "head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 28,
}  # fmt: skip
LLAMA_3_1_8B = LLAMA_3_2_1B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_3_1_8B["tie_word_embeddings"] = False
del LLAMA_3_1_8B["head_dim"]
LLAMA_3_1_70B = LLAMA_3_1_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
