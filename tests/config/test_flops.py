"""Counted operations and parameters: those of the papers, of torch and of models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NATIVE_FAMILIES, prompt, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from midus_hf import models  # noqa: F401 - registers the families that host memory
from midus_hf.config.declared_tensors import ZEROS, ModelSizes
from midus_hf.memories import flops as counting
from midus_hf.memories.flops import MASK_AND_SCALE, linear
from midus_hf.memories.midus.options import MidusHmlOptions, MidusLinearOptions, MidusPkmOptions
from midus_hf.memories.moc.options import MocOptions
from midus_hf.memories.moda.options import ModaOptions, Slot
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import MEMORY_TYPES
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options
from upscalers.architecture.flops import count_flops as estimate_flops
from upscalers.architecture.flops import count_parameters

MODELS = Path(__file__).parents[2] / "configs" / "models"
SIZES = ModelSizes(hidden_size=32, num_heads=4, intermediate_size=48, num_layers=6)
BATCH, TOKENS = 2, 24
ROWS = BATCH * TOKENS


def paper_config(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def of_memory(options: MemoryOptions) -> dict[str, int]:
    return options.flops(SIZES, BATCH, TOKENS, 0, 1)


def test_layers_and_chapters_have_the_papers_flops():
    plain = estimate_flops(paper_config("vanilla-148m"), 1024).layers[0]
    assert plain == {
        "attention": 6_530_531_328, "rotary embedding": 3_145_728, "norms": 6_299_648, "feed-forward": 10_883_432_448,
        "residual adds": 1_572_864,
    }  # fmt: skip
    flops = estimate_flops(paper_config("moc-371m"), 1024)
    layers = flops.layers
    added = {name: count for name, count in layers[2].items() if name not in layers[0]}
    assert added == {
        "chapters: router": 7_124_491, "chapters: router losses": 331_859, "chapters: memory tokens": 15_991_040,
        "chapters: attention": 25_674_645_504, "chapters: norms": 3_149_824, "chapters: residual adds": 786_432,
    }  # fmt: skip
    assert [index for index, layer in enumerate(layers) if layer != layers[0]] == [2, 6, 10, 14]
    assert flops.outside == {"final norm": 3_149_824, "language head": 77_309_411_328, "cross entropy": 251_412_480}


@pytest.mark.parametrize(
    ("name", "batch", "forward"),
    [
        ("vanilla-148m", 1, 356_363_685_888),
        ("vanilla-203m", 1, 495_763_542_016),
        ("moc-371m", 1, 459_171_802_488),
        ("moc-371m", 3, 1_377_515_243_584),  # what `estimate_flops.py` of the release prints of its `base_small_run2`
    ],
)
def test_models_have_the_papers_flops(name, batch, forward):
    flops = estimate_flops(paper_config(name), 1024, batch)
    assert (flops.forward, flops.backward, flops.total) == (forward, 2 * forward, 3 * forward)


@pytest.fixture
def products_alone(monkeypatch):
    for free in ("rms_norm", "attention_weights"):
        monkeypatch.setattr(counting, free, lambda *arguments: 0)
    monkeypatch.setattr(counting, "linear", lambda rows, inputs, outputs, bias=False: linear(rows, inputs, outputs))
    monkeypatch.setattr(counting, "ACTIVATIONS", dict.fromkeys(counting.ACTIVATIONS, -1))
    monkeypatch.setattr(counting, "SOFT_CAP", 0)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_matrix_products_equal_those_of_torch(family, products_alone):
    model, tokens = tiny_model(family, attn_implementation="eager"), prompt()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    by_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    # Angles, once for all layers.
    rotary = sum(count for name, count in by_module.items() if name.endswith("rotary_emb"))
    parts = estimate_flops(model.config.to_dict(), tokens.shape[1], tokens.shape[0]).parts
    counted = parts["attention"] + parts["feed-forward"] + parts["language head"]
    assert counted == by_module["Global"] - rotary > 0


def of_family(family: str, **changes: Any) -> dict[str, int]:
    return estimate_flops(NATIVE_FAMILIES[family].config(**changes).to_dict(), TOKENS, BATCH).parts


def norm(width: int) -> int:
    return ROWS * (4 * width + 4)


def test_biases_norms_and_caps_of_families_are_counted():
    llama = of_family("llama")
    assert llama["norms"] == 4 * 2 * norm(32)
    biased = of_family("llama", attention_bias=True, mlp_bias=True)
    assert biased["attention"] - llama["attention"] == 4 * ROWS * (32 + 2 * 16 + 32)
    assert biased["feed-forward"] - llama["feed-forward"] == 4 * ROWS * (2 * 48 + 32)
    assert of_family("qwen2")["attention"] - llama["attention"] == 4 * ROWS * (32 + 2 * 16)
    assert of_family("qwen3")["norms"] == 4 * (2 * norm(32) + (4 + 2) * norm(16))
    assert of_family("olmo2")["norms"] == 4 * (2 * norm(32) + norm(32) + norm(16))
    assert of_family("gemma2")["norms"] == 4 * 4 * norm(32)
    assert of_family("gemma2")["feed-forward"] - llama["feed-forward"] == 4 * ROWS * 48 * (8 - 4)
    assert of_family("gemma2")["embedding"] == ROWS * 32
    capped, plain = of_family("gemma2"), of_family("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert capped["attention"] - plain["attention"] == 4 * BATCH * 4 * TOKENS * TOKENS * 6
    assert capped["language head"] - plain["language head"] == ROWS * 128 * 6
    assert of_family("gemma3", sliding_window=2) == of_family("gemma3", sliding_window=100)  # nothing is less


@pytest.mark.parametrize("memory_type", MEMORY_TYPES)
def test_every_memory_type_counts_flops(memory_type):
    options = MEMORY_TYPES[memory_type]()
    few, many = options.flops(SIZES, 1, 24, 1, 3), options.flops(SIZES, 2, 24, 1, 3)
    assert all(type(count) is int for count in many.values())
    assert sum(few.values()) < sum(many.values()) <= 2 * sum(few.values())


def second_layer(family: str, *inserted: str) -> dict[str, int]:
    memory = [{"type": memory_type, "n": 4, "k": 2, "layers": [1]} for memory_type in inserted]
    return estimate_flops(NATIVE_FAMILIES[family].config().to_dict() | {"memory": memory}, TOKENS, BATCH).layers[1]


def test_inserted_memory_counts_attention_without_ffn():
    block = second_layer("llama", "midus-hml")
    assert "feed-forward" not in block
    assert "residual adds" not in block
    assert second_layer("llama")["attention"] - block["attention"] == linear(ROWS, 32, 32)
    assert block["norms"] == norm(32)
    of_block = sum(count for name, count in block.items() if name.startswith("midus-hml: "))
    assert of_block == sum(of_memory(MidusHmlOptions(n=4, k=2)).values())
    with_output = second_layer("gemma2", "midus-pkm")
    assert (with_output["attention"], with_output["norms"]) == (second_layer("gemma2")["attention"], 2 * norm(32))
    assert second_layer("olmo2", "midus-hml")["norms"] == norm(32) + norm(16)


def test_midus_hml_flops():
    queries = ROWS * 4
    assert of_memory(MidusHmlOptions(n=8, k=2)) == {
        "scores": 2 * 2 * queries * 4 * 8,
        "choice": queries * (2 * 8 * 1 + 4 + 4 * 1),
        "values": 2 * queries * 2 * 8 + 4 * 2 * ROWS * 8 * 8,
        "query norm": 0,
        "weights": queries * 2 * 5,
        "residual adds": ROWS * 32,
    }
    normed = of_memory(MidusHmlOptions(n=8, k=2, query_norm="layer", inner_residual=True))
    assert (normed["query norm"], normed["residual adds"]) == (queries * (8 * 8 + 8), 2 * ROWS * 32)
    expanded = of_memory(MidusHmlOptions(n=2, k=2))["values"]  # for 4 rows of the bank, fewer than tokens
    assert expanded == 2 * queries * 2 * 8 + 4 * 2 * 4 * 8 * 8


def test_shared_value_flops():
    product_key, flat = of_memory(MidusPkmOptions(n=8, k=2)), of_memory(MidusLinearOptions(slots=64, k=2))
    for counted in (product_key, flat):
        assert counted["query projection"] == 2 * ROWS * 32 * 32
        assert counted["values"] == 2 * ROWS * 4 * 2 * 32
        assert counted["residual adds"] == 2 * ROWS * 32
    assert product_key["scores"] == 2 * 2 * ROWS * 4 * 4 * 8
    assert (flat["scores"], flat["choice"]) == (2 * ROWS * 4 * 8 * 64, ROWS * 4 * 64)


ULTRAMEM: dict[str, Any] = {"n": 8, "k": 4, "key_width": 6, "value_width": 10, "pre_value_width": 2}


def ultramem(**options: Any) -> dict[str, int]:
    return of_memory(UltraMemV2Options(**{**ULTRAMEM, **options}))


def test_ultramem_v2_flops():
    assert ultramem() == {
        "queries": 2 * ROWS * 32 * (2 * 2 * 6) + 2 * 2 * (ROWS + 8) * (4 * 6 + 4),
        "scores": 2 * (2 * ROWS * 2 * 6 * 8),
        "choice": ROWS * 2 * (2 * 2 * 8 + 8 * 2)  # leading scores of rows and of columns, and 4 of 8 of each
        + ROWS * (2 * 4 * 2 * 2 + 2 * 16 * 2)  # rows times the core, times columns
        + ROWS * 16 * 2,  # 4 of 16 pairs
        "pre-values": 2 * ROWS * 32 * 2 + ROWS * 4 * (2 * 2 + 1),
        "values": 2 * ROWS * 4 * 10,
        "output projection": 2 * ROWS * 10 * 32,
        "residual adds": ROWS * 32,
    }
    plain, heads = ultramem(), ultramem(heads=3)
    assert all(heads[part] == 3 * plain[part] for part in ("scores", "choice", "values"))
    assert heads["output projection"] == plain["output projection"]
    assert heads["queries"] == 3 * plain["queries"]
    assert ultramem(pre_value_width=0)["pre-values"] == 0
    assert ultramem(share="ring:4", n=4) == plain  # twice as many keys for four tables of a quarter


CHAPTERS: dict[str, Any] = {"memory_tokens": 256, "chapters": 16, "shared_chapters": 1, "k": 3, "routing": "sequence"}
SELECTED = 4 * 16


def chapters(**options: Any) -> dict[str, int]:
    return of_memory(MocOptions(**{**CHAPTERS, **options}))


def test_moc_flops_of_chunks_and_tokens_read_the_bank_once():
    read = {"sequence": BATCH * SELECTED, "chunk": 256, "token": 256}
    choices = {"sequence": BATCH, "chunk": 3 * BATCH, "token": ROWS}
    for routing, counted in {name: chapters(routing=name, chunk_size=8) for name in read}.items():
        rows, chosen = read[routing], choices[routing]
        pooled = 0 if routing == "token" else BATCH * 32 * (TOKENS - 1) + chosen * 32
        assert counted["router"] == pooled + chosen * (2 * 32 * 16 + 16 * 5 + 16 * 2)
        assert counted["attention"] == (
            2 * 2 * ROWS * 32 * 32 + 2 * 2 * rows * 32 * 32 + 4 * ROWS * SELECTED * 32 + 4 * ROWS * SELECTED * 7
        )
    few = chapters(routing="chunk", chunk_size=12, memory_tokens=4096, chapters=256)  # chunks of 8, 4 and the rest
    assert few["attention"] == chapters()["attention"] + 2 * 2 * (3 * BATCH - BATCH) * SELECTED * 32 * 32
    rows, scores = BATCH * SELECTED, 4 * ROWS * SELECTED
    assert chapters()["memory tokens"] == rows * 32 + rows * (4 * 32 + 4)
    assert chapters(routing="token")["memory tokens"] == 2 * scores + 256 * (4 * 32 + 4)


@pytest.mark.parametrize(("changes", "tokens", "batch", "message"), [
    ({}, 0, 1, "sequence length is 0; expected 1 or more"),
    ({"hidden_act": "laplace"}, 8, 1, "the activation is 'laplace', whose FLOPs are unknown; expected one of: silu, swish"),
    ({"memory": [{"type": "midus-hml", "layers": [9]}]}, 8, 1, "names layer 9; expected 0 <= layer < 4"),
])  # fmt: skip
def test_uncountable_flops_are_refused(changes, tokens, batch, message):
    config = {**NATIVE_FAMILIES["llama"].config().to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        estimate_flops(config, tokens, batch)
    uncounted = type("UncountedOptions", (MemoryOptions,), {"type": "uncounted"})()
    with pytest.raises(
        ValueError, match="the FLOPs of memory type 'uncounted' are unknown; expected a method flops of"
    ):
        of_memory(uncounted)


# Entries of memories, and how many numbers their banks hold.
MEMORIES: list[tuple[dict[str, Any], int]] = [
    ({"type": "midus-hml", "n": 4, "k": 2, "query_norm": "batch", "layers": [1]}, 16 * 8),
    ({"type": "midus-hml", "n": 4, "k": 2, "output_projection": True, "layers": [0, 2]}, 2 * 16 * 8),
    ({"type": "midus-pkm", "n": 4, "k": 2, "layers": [1]}, 16 * 32),
    ({"type": "midus-linear", "slots": 8, "layers": [3]}, 8 * 32),
    ({"type": "moc", "share": "all", "layers": [0, 2, 3]}, 4096 * 32),
    ({"type": "moc", "share": "every:2", "layers": [0, 2, 3]}, 2 * 4096 * 32),
    ({"type": "moc", "share": "none", "layers": [0, 2]}, 2 * 4096 * 32),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "layers": [0, 1, 3]}, 3 * 64 * (6 + 2)),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "pre_value_width": 0, "share": "all", "layers": [0, 2]}, 64 * 6),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "share": "ring:3", "layers": [0, 1, 3]}, 3 * 64 * 8),
    ({"type": "ultramem-v2", "n": 8, "k": 2, "share": "ring:2", "heads": 2, "layers": [0, 1, 2, 3]}, 4 * 64 * 8),
]


def counts_of(name: str) -> dict[str, int]:
    return count_parameters(json.loads((MODELS / f"{name}.json").read_text()))


def parts_of(counts: dict[str, int]) -> tuple[int, int, int]:
    return counts["backbone"], counts["memory_values"], counts["memory_rest"]


def numbers_of(config: Any) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def test_moc_models_have_the_papers_parameters():
    """Appendix A.4.1: 371.29M = 147.87M + 201.38M + 22.04M, and 202.94M of the deeper model without memory."""
    assert parts_of(counts_of("moc-371m")) == (147_874_560, 201_375_744, 22_042_628)
    assert counts_of("moc-371m")["total"] == 371_292_932
    assert parts_of(counts_of("vanilla-148m")) == (147_874_560, 0, 0)
    assert parts_of(counts_of("vanilla-203m")) == (202_937_088, 0, 0)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_family_parameters_equal_the_models(native_family, changes):
    config = NATIVE_FAMILIES[native_family].config(**changes)
    counts = count_parameters(config.to_dict())
    assert parts_of(counts) == (numbers_of(config), 0, 0)
    assert counts["activated"] == counts["total"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert counts["total"] - counts["total_without_embeddings"] == sum(weight.numel() for weight in embeddings)


@pytest.mark.parametrize(("memory", "values"), MEMORIES, ids=str)
def test_memory_parameters_equal_the_models(native_family, memory, values):
    native = NATIVE_FAMILIES[native_family].config().to_dict()
    model_type, config = f"midus_{native.pop('model_type')}", {**native, "memory": [memory]}
    counts = count_parameters({**config, "model_type": model_type})
    assert counts["total"] == numbers_of(AutoConfig.for_model(model_type, **config))
    assert counts["memory_values"] == values


@pytest.mark.parametrize(
    ("memory", "read"),
    [
        ({"type": "midus-hml", "n": 4, "k": 3, "layers": [1]}, 4 * 3 * 8),
        ({"type": "midus-pkm", "n": 4, "k": 3, "layers": [1]}, 4 * 3 * 32),
        ({"type": "ultramem-v2", "n": 8, "k": 5, "heads": 2, "share": "ring:2", "layers": [0, 1, 2]}, 3 * 2 * 5 * (6 + 2)),
        ({"type": "ultramem-v2", "n": 8, "k": 5, "pre_value_width": 0, "value_width": 7, "layers": [0]}, 5 * 7),
        ({"type": "moc", "memory_tokens": 64, "chapters": 8, "k": 2, "layers": [1, 2]}, 2 * 3 * 8 * 32),
        # The first two layers read at most the whole bank, the third 6 of 8 chapters of another.
        ({"type": "moc", "memory_tokens": 64, "chapters": 8, "k": 5, "share": "every:2", "layers": [0, 1, 2]}, (8 + 6) * 256)],
    ids=str,
)  # fmt: skip
def test_token_activates_all_but_unread_values(memory, read):
    native = NATIVE_FAMILIES["llama"].config().to_dict()
    counts = count_parameters({**native, "model_type": "midus_llama", "memory": [memory]})
    assert read < counts["memory_values"]
    assert counts["activated"] == counts["total"] - counts["memory_values"] + read


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_missing_config_keys_have_class_defaults(family):
    full = NATIVE_FAMILIES[family].config_class().to_dict()
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size model_type".split()
    assert estimate_flops({key: full[key] for key in sizes}, 8) == estimate_flops(full, 8)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "gpt2"}, "model_type = 'gpt2'; expected one of: llama, qwen2, .*, or midus_ and one of them"),
    ({"hidden_size": None}, "hidden_size = None; expected a positive integer"),
    ({"vocab_size": "many"}, "vocab_size = 'many'; expected a positive integer"),
])  # fmt: skip
def test_uncountable_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        estimate_flops({**NATIVE_FAMILIES["llama"].config().to_dict(), **changes}, 8)


def test_unproven_plugin_family_is_refused():
    class AlpacaConfig(LlamaConfig):
        model_type = "alpaca"

    class AlpacaForCausalLM(LlamaForCausalLM):
        config_class = AlpacaConfig

    AutoConfig.register("alpaca", AlpacaConfig)
    AutoModelForCausalLM.register(AlpacaConfig, AlpacaForCausalLM)
    config = NATIVE_FAMILIES["llama"].config(attention_bias=True).to_dict()
    try:
        with pytest.raises(ValueError, match=r"'alpaca' is not among .* python -m scripts\.anatomy alpaca$"):
            count_parameters({**config, "model_type": "alpaca"})
    finally:
        del CONFIG_MAPPING._extra_content["alpaca"]
        del AutoModelForCausalLM._model_mapping._extra_content[AlpacaConfig]


WITHOUT_FFN = {"ffn_slots": False}
PROJECTED = {"attention_slots": "projected"}


def config_of(name: str, layers: int | None = None, without: bool = False, **options: Any) -> dict[str, Any]:
    """A model of the paper, with other options of its memory or without it, and as many layers."""
    config = json.loads((MODELS / f"{name}.json").read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
    for entry in config["memory"]:
        entry.update(options)
    return {**config, "memory": []} if without else config


@pytest.mark.parametrize(("config", "millions", "trillions"), [
    (config_of("olmo2-669m"), 669.0, 8.01),
    (config_of("olmo2-669m", 38), 700.5, 8.41),
    (config_of("moda-706m", **WITHOUT_FFN), 669.0, 8.02),
    (config_of("moda-706m"), 705.7, 8.33),
    (config_of("moda-706m", **PROJECTED), 742.4, 8.63),
], ids=str)  # fmt: skip
def test_moda_models_have_the_papers_parameters_and_flops(config, millions, trillions):
    """Table 3, which has no price for mask and scale of the scores of the sequence."""
    tokens, layers = 4096, config["num_hidden_layers"]
    scores = layers * config["num_attention_heads"] * tokens**2
    assert round(count_parameters(config)["total"] / 1e6, 1) == millions
    assert round((estimate_flops(config, tokens).forward - MASK_AND_SCALE * scores) / 1e12, 2) == trillions


@pytest.mark.parametrize("model", [("moda-74m", 24, 71.35, 73.72), ("moda-128m", 48, 123.38, 128.11)])
def test_last_layer_has_no_unread_projection(model):
    """Table 6 has a projection in every layer, that of the last included; table 3 has none there."""
    (name, layers, plain, millions), projection = model, 2 * (384 * 128 + 128)
    totals = [count_parameters(config_of(name, **more))["total"] for more in ({}, {"without": True}, WITHOUT_FFN)]
    assert [round(total / 1e6, 2) for total in totals[1:]] == [plain] * 2
    assert totals[0] - totals[1] == (layers - 1) * projection
    assert (totals[0] + projection) / 1e6 == pytest.approx(millions, abs=0.01)


def test_slots_are_read_by_later_layers_only():
    options = ModaOptions(attention_slots="reused")
    assert options.slots_read(0) == ()
    assert options.slots_read(2) == tuple(Slot(layer, source) for layer in (0, 1) for source in ("attention", "ffn"))
    taken = ("attention_key", "attention_value", "ffn_key", "ffn_value")
    assert options.layer_inputs(1) == tuple((0, name) for name in taken)
    assert options.layer_outputs(1, 3)
    assert not options.layer_outputs(2, 3)
    projections = {"ffn_key.weight", "ffn_value.weight"}
    expected = [projections, {"depth_gate", *projections}, {"depth_gate"}]
    assert [set(options.tensors_at(SIZES, index, 3)) for index in range(3)] == expected


JOININGS = [("added", True, {"ffn_value.weight", "attention_value.weight"})]
JOININGS += [("interpolated", True, set()), ("joint", False, set())]


@pytest.mark.parametrize(("joining", "gates", "silent"), JOININGS)
def test_initial_tensors_follow_the_way_of_joining(joining, gates, silent):
    tensors = ModaOptions(joining=joining, attention_slots="projected").tensors(SIZES)
    assert ("depth_gate" in tensors) == gates
    assert {name for name, tensor in tensors.items() if tensor.initial == ZEROS} - {"depth_gate"} == silent
    assert not gates or tensors["depth_gate"].initial == ZEROS
