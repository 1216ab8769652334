"""GGUF bases: read through transformers' loader, and the same from there on."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import by_default
from tiny import prompt, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from tests.upscalers.checkpoints import (
    config_of,
    load,
    logits,
    record_of,
    same_bits,
    same_tensors,
    with_memory,
)
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.gguf import open_gguf
from upscalers.request.errors import RequestError

gguf = pytest.importorskip("gguf")

# Of logits up to 0.5, which those of another random model are 0.8 from.
TOLERANCES = {"F32": 1e-6, "Q8_0": 0.02, "Q4_1": 0.2}
REAL_PARAMETERS = 134_515_008


FILES = ["llama-F32", "llama-Q4_1", "gemma2-Q8_0"]


def write_gguf(
    path: Path,
    quantisation: "gguf.GGMLQuantizationType",
    architecture: str = "llama",
    heads_in_header: int | None = None,
    without: str = "",
    tensors_in_part: int = 0,
) -> Any:
    """Write a tiny model, and return what was written, before quantisation.

    Args:
        path: Where to.
        quantisation: Of its matrices.
        architecture: The family, which GGUF calls by the same name.
        heads_in_header: A number of heads of keys that the tensors do not have.
        without: Name of a tensor that is left out.
        tensors_in_part: The most tensors in a file, where the model is split over files; 0 for one file.
    """
    model = tiny_model(architecture, hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_part)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(heads_in_header or config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", "t", "h", "th"]
    tokens += [f"word{index}" for index in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        name: stored
        for stored, name in gguf_utils.get_gguf_hf_weights_map(model, gguf_utils.TensorProcessor()).items()
    }
    if architecture == "llama":  # llama.cpp stores the angles of Llama 3, which no tensor of the model holds
        writer.add_tensor("rope_freqs.weight", torch.ones(config.head_dim // 2).numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if names[name] == without:
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, config.num_attention_heads)
        if architecture == "gemma2" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.dim() == 1:
            writer.add_tensor(names[name], tensor.numpy())
        else:
            writer.add_tensor(names[name], gguf.quantize(tensor.numpy(), quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows that GGUF gives to what rotary embeddings turn."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


of_all_files = pytest.mark.parametrize(
    "file", by_default(FILES, [f"{a}-{q}" for a in ("llama", "qwen2", "gemma2") for q in TOLERANCES])
)


def written(folder: Path, file: str) -> tuple[Path, Any]:
    """Write a tiny model as GGUF, and return the file and what the model was before it was written."""
    architecture, _, quantisation = file.partition("-")
    path = folder / "models" / f"{file}.gguf"
    path.parent.mkdir()
    return path, write_gguf(path, gguf.GGMLQuantizationType[quantisation], architecture)


@pytest.fixture
def base(tmp_path) -> Path:
    """A tiny Llama of few bits as GGUF."""
    return written(tmp_path, "llama-Q4_1")[0]


@of_all_files
def test_tensors_are_read_one_by_one_as_the_loader_reads_the_whole_file(file, tmp_path):
    path, _ = written(tmp_path, file)
    (tmp_path / "read").mkdir()
    tensors = open_gguf(path, tmp_path / "read")
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    assert tensors.keys() == own.keys() - (
        {"lm_head.weight"} if config_of(tmp_path / "read")["tie_word_embeddings"] else set()
    )
    assert all(same_bits(read_tensor(tensors[name]), own[name]) for name in tensors)


def test_a_tensor_that_no_tensor_of_the_file_is_alone_is_refused(base, tmp_path, monkeypatch):
    honest = gguf_utils.get_gguf_hf_weights_map

    def names(*arguments, **options):
        return {stored: name for stored, name in honest(*arguments, **options).items() if "ffn_up" not in stored}

    monkeypatch.setattr(gguf_utils, "get_gguf_hf_weights_map", names)
    message = r"cannot be read tensor by tensor: no tensor of the file alone is model.layers.0.mlp.up_proj.weight, .* 1 more\. Give"
    for dry_run in (True, False):
        with pytest.raises(RequestError, match=message):
            with_memory(base, tmp_path / "out", dry_run=dry_run)
    assert [file.name for file in tmp_path.iterdir()] == ["models"]


@of_all_files
def test_the_result_computes_what_transformers_own_loading_computes(file, tmp_path):
    path, original = written(tmp_path, file)
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, before = own(prompt()).logits, original.eval()(prompt()).logits
    architecture, _, quantisation = path.stem.partition("-")
    if architecture == "llama":  # the files of others do not hold their windows
        assert (expected - before).abs().max() < TOLERANCES[quantisation]
    report = with_memory(path, tmp_path / "out")
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert report.base == str(path)
    assert torch.equal(logits(tmp_path / "out"), expected)
    assert load(tmp_path / "out").dtype == torch.float32


def test_tokenizer_and_provenance_come_from_the_file_and_nothing_is_left_of_them_elsewhere(
    base, tmp_path, monkeypatch
):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with_memory(base, tmp_path / "out", verify=False)
    assert [file.name for file in base.parent.iterdir()] == [base.name]
    assert list((tmp_path / "temporary").iterdir()) == []
    own = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    travelled = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert travelled("th").input_ids == own("th").input_ids
    assert travelled.eos_token == own.eos_token
    assert record_of(tmp_path / "out")["base"]["name"] == base.name
    assert "quantization_config" not in config_of(tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    for name, content in (("empty.gguf", b""), ("noise.gguf", b"noise" * 100), ("cut.gguf", b"GGUF\x03\0\0\0")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=rf"transformers cannot read {name} \(.*\)\. Download it again"):
            with_memory(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_missing_package_is_named(base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        RequestError,
        match=r"is a GGUF file, which needs the gguf package; in the clone of midus_hf, run: pip",
    ):
        with_memory(base, tmp_path / "out")


def test_a_file_whose_tensors_do_not_fit_its_header_is_refused(tmp_path):
    path = tmp_path / "odd.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.F32, "qwen2", heads_in_header=2)
    message = (
        r"transformers cannot read odd.gguf \(ValueError: blk\.0\.attn_k\.\S+ has \d+ elements .* Download it again"
    )
    with pytest.raises(RequestError, match=message):
        with_memory(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def split_gguf(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Write a tiny model as one file and as several, and return the one and the several."""
    for name, tensors in (("whole", 0), ("split", 20)):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "m.gguf", gguf.GGMLQuantizationType.F32, tensors_in_part=tensors)
    return tmp_path / "whole" / "m.gguf", sorted((tmp_path / "split").iterdir())


def test_a_file_that_was_split_is_read_whole(tmp_path):
    whole, parts = split_gguf(tmp_path)
    assert len(parts) > 1
    planned = with_memory(parts[0], tmp_path / "none", dry_run=True)
    report = with_memory(parts[0], tmp_path / "out")
    with_memory(whole, tmp_path / "expected")
    assert planned.parameters == report.parameters and report.identity.max_abs_diff == 0.0
    assert same_tensors(tmp_path / "out", tmp_path / "expected")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "expected")
    assert not config_of(tmp_path / "out")["tie_word_embeddings"]  # the head is in another part than the header


def test_parts_that_are_not_all_there_or_not_the_first_are_refused(tmp_path):
    _, parts = split_gguf(tmp_path)
    with pytest.raises(
        RequestError, match=rf"{parts[1].name} is a part of a GGUF file; expected .* --base {parts[0]}"
    ):
        with_memory(parts[1], tmp_path / "out")
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(RequestError, match=rf"speaks of {len(parts)} parts, and its name of 1; .* Rename the files"):
        with_memory(renamed, tmp_path / "out")
    renamed.rename(parts[0])
    parts[1].unlink()
    for dry_run in (True, False):
        with pytest.raises(RequestError, match=rf"{parts[1].name} is not beside it; expected all parts. Download"):
            with_memory(parts[0], tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacking", ["blk.1.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_a_tensor_that_the_file_lacks_is_named_and_never_drawn_at_random(tmp_path, lacking):
    path = tmp_path / "m.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.F32, without=lacking)
    message = rf"m.gguf lacks {lacking} \(model\..*\); expected every tensor of the model"
    for dry_run in (True, False):
        with pytest.raises(RequestError, match=message):
            with_memory(path, tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


@pytest.mark.product
@pytest.mark.material
def test_a_real_quantised_model_is_upscaled_identically(tmp_path):
    from material.smollm2 import smollm2_135m, smollm2_gguf

    planned = with_memory(smollm2_gguf(), tmp_path / "none", num_new_layers=3, dry_run=True)
    report = with_memory(smollm2_gguf(), tmp_path / "out", num_new_layers=3)
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert planned.parameters == report.parameters and report.parameters.base == REAL_PARAMETERS
    assert torch.equal(logits(smollm2_135m()), logits(tmp_path / "out"))
    question = "The capital of France is"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer(question, return_tensors="pt")
    text = tokenizer.decode(load(tmp_path / "out").generate(**tokens, max_new_tokens=3, do_sample=False)[0])
    assert text.removeprefix(question).strip().startswith("Paris")
