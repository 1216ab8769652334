"""Tables of values as integers: what a model computes with them, that it is saved and loaded whole, and what is refused."""

import copy
import itertools
from typing import Any

import pytest
import torch
from models import ultramem_models
from models.cases import CASES, GREEDY
from models.fresh_process import run_python
from models.hosting import logits
from models.upscaled import upscaled_model
from pairs import by_default, in_turn
from tiny import prompt, save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.quantise import quantise_tables
from midus_hf.memories.tables import DeclaredModule, read_rows
from midus_hf.ops import op_choices
from midus_hf.ops.chapters.quantisation import dequantise_rows, quantise_rows
from midus_hf.training.optim.freezing import set_trainable
from upscalers import upscale

ALL_KINDS = ("headwise", "product-key", "linear", *(f"ultramem {kind}" for kind in ultramem_models.KINDS))
# Tables of each layer, with heads and without, and tables that layers share.
KINDS = by_default(["headwise", "product-key", "linear", "ultramem own", "ultramem ring"], ALL_KINDS)


def acting(kind: str, dtype: torch.dtype = torch.float32, small: bool = False) -> Any:
    """Return a model whose memories of a kind act, in eval mode; a small one has few layers."""
    return CASES[kind].model("llama", None, dtype, small=small)  # type: ignore[arg-type]


def with_rows_that_integers_stand_for(model: Any, rounded: Any, bits: int) -> Any:
    """Return the model, each table of values replaced by what the integers of the rounded model stand for."""
    for module, other in zip(model.modules(), rounded.modules(), strict=True):
        for name in module.names_of("value") if isinstance(module, DeclaredModule) else ():
            integers, scales = getattr(other, f"{name}_integers"), getattr(other, f"{name}_scales")
            table = module.declared_tensor(name)
            table.data = dequantise_rows(integers, scales, bits, table.dtype)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_computes_with_the_rows_that_integers_stand_for(kind, bits):
    model = acting(kind)
    rounded = copy.deepcopy(model)
    quantise_tables(rounded, bits)
    expected = with_rows_that_integers_stand_for(copy.deepcopy(model), rounded, bits)
    for tokens in (prompt(), prompt(1, 1)):  # many rows, of which a table may be all, and few
        with op_choices(backend="reference"):
            assert torch.equal(logits(rounded, tokens), logits(expected, tokens))
            assert not torch.equal(logits(rounded, tokens), logits(model, tokens))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_take_the_bytes_of_their_integers_and_scales(kind, bits):
    model = acting(kind, torch.bfloat16)
    tables = [tensor for name, tensor in model.named_parameters() if name.endswith(("value_bank", "value_table"))]
    before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    quantise_tables(model, bits)
    after = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    saved = sum(tensor.nbytes - tensor.numel() * bits // 8 - tensor.nbytes // tensor.shape[-1] for tensor in tables)
    assert before - after == saved > 0


@pytest.mark.parametrize(("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]))
def test_a_saved_model_loads_with_equal_results(kind, dtype, tmp_path):
    # Loaded first, since a model that is cast keeps angles of rotation in another dtype than one that is loaded.
    acting(kind, dtype).save_pretrained(tmp_path / "floats")
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "floats"), prompt(5)
    quantise_tables(model, 4)
    model.save_pretrained(tmp_path / "integers")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "integers")
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))
    assert torch.equal(loaded.generate(tokens, **GREEDY), model.generate(tokens, **GREEDY))


_LOAD = """
import torch
from transformers import AutoModelForCausalLM
for name in ("headwise", "product-key", "ultramem ring"):
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    with torch.no_grad():
        logits = model(torch.load("tokens.pt")).logits
    assert torch.equal(logits, torch.load(f"{name}/logits.pt")), f"{name}: other logits"
"""


def test_saved_models_load_without_the_package(tmp_path):
    tokens = prompt(5)
    torch.save(tokens, tmp_path / "tokens.pt")
    for kind in ("headwise", "product-key", "ultramem ring"):
        model = acting(kind)
        quantise_tables(model)
        model.save_pretrained(tmp_path / kind)
        with op_choices(backend="reference"):
            torch.save(logits(model, tokens), tmp_path / kind / "logits.pt")
    run_python(_LOAD, tmp_path, package_present=False)


def test_values_are_not_kept_expanded():
    model = acting("headwise")
    quantise_tables(model)
    with decode_cache(model), torch.no_grad():
        memories = [module for module in model.modules() if isinstance(module, MemoryModule)]
        assert memories and all(memory.decode_cache is None for memory in memories)


def test_few_slots_dequantise_their_rows_alone_and_many_the_table_once():
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    integers, scales = quantise_rows(table, 8)
    whole = dequantise_rows(integers, scales, 8, torch.float32)
    for slots, rows in ((torch.tensor([[5, 2]]), 2), (torch.tensor([[5, 2, 5, 0], [1, 1, 1, 1]]), 6)):
        read, places = read_rows(integers, scales, 8, slots, torch.float32)
        assert len(read) == rows and torch.equal(read[places], whole[slots])


class _LogitsOf(torch.nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("kind", "bits"),
    # docs/serve.md exports headwise memory with integers.
    by_default(
        [("ultramem own", 8)],
        itertools.product(("headwise", "product-key", "ultramem own"), (None, 8)),
        fewest=[("headwise", None)],
    ),
)
def test_a_model_is_exported_as_one_graph_for_any_number_of_tokens(kind, bits):
    model, tokens = acting(kind, small=True), prompt(7)
    if bits is not None:
        quantise_tables(model, bits)
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with op_choices(backend="reference"):
        graph = torch.export.export(_LogitsOf(model), (tokens,), dynamic_shapes=sizes).module()
        for some in (tokens, prompt(4, 3)):
            assert torch.equal(graph(some), logits(model, some))


def _unfinite(model: Any) -> Any:
    table = next(tensor for name, tensor in model.named_parameters() if name.endswith("value_bank"))
    table.data[0, 0] = float("inf")
    return model


def _rounded(model: Any) -> Any:
    quantise_tables(model)
    return model


REFUSED = {
    "bits": (lambda: acting("headwise"), 2, "bits is 2; expected 8 or 4"),
    "training": (lambda: acting("headwise").train(), 8, "training mode.*expected model.eval()"),
    "twice": (lambda: _rounded(acting("headwise")), 4, "has value_bits = 8 already"),
    "chapters": (lambda: acting("token behind layers"), 8, "type 'chapters'.*midus edit quantise"),
    "no table": (lambda: upscaled_model("llama", new_layers=()), 8, "no table of values"),
    "infinite": (lambda: _unfinite(acting("product-key")), 8, "value_bank has a number that is not finite"),
    "offloaded": (lambda: acting("product-key").to("meta"), 8, "value_bank is on the meta device.*without offloading"),
    "odd": (
        lambda: upscaled_model(
            "llama", acting=True, hidden_size=36, num_attention_heads=4, num_key_value_heads=2, head_dim=8
        ),
        4,
        "value_bits is 4 and hidden_size / num_attention_heads is 9; expected an even width",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rounded_is_refused(case):
    make, bits, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        quantise_tables(make(), bits)


def test_a_model_of_integers_does_not_train():
    model = _rounded(acting("headwise"))
    with pytest.raises(ValueError, match="type 'headwise' has value_bits = 8, and integers do not train"):
        set_trainable(model, "new")


def test_no_model_is_upscaled_with_integers(tmp_path):
    save_tiny_model("llama", tmp_path / "base")
    with pytest.raises(ValueError, match=r"value_bits is 8, but new values have yet to learn.*quantise_tables"):
        upscale(base=tmp_path / "base", method="midus-hml", output=tmp_path / "out", options={"n": 8, "value_bits": 8})


class _AsTorchaoDoes(torch.nn.Parameter):
    """A parameter of another class, as torchao's are."""


def test_a_quantisation_config_that_quantises_what_a_memory_reads_is_refused(tmp_path, monkeypatch):
    acting("product-key").save_pretrained(tmp_path)
    loads = PreTrainedModel.from_pretrained.__func__

    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = loads(cls, *args, **kwargs)
        memory = next(module for module in model.modules() if isinstance(module, MemoryModule))
        memory.value_bank = _AsTorchaoDoes(memory.value_bank.data)
        model.hf_quantizer = object()
        return model

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    with pytest.raises(ValueError, match=r"has made a _AsTorchaoDoes of .*value_bank.*expected linear layers alone"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
