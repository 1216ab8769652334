"""Tables of values as integers: what a model computes with them, that it is saved and loaded whole, and what is refused."""

import copy
import itertools
from pathlib import Path
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.tables import DeclaredModule, gather_rows
from midus_hf.ops import op_choices
from midus_hf.ops.chapters.quantisation import dequantise_rows, quantise_rows
from midus_hf.training.optim.freezing import set_trainable
from upscalers import upscale
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.quantising import quantise
from upscalers.runs.strip import strip

TABLES = ("value_bank", "value_table", ".bank")
ALL_KINDS = (
    "headwise",
    "product-key",
    "linear",
    "token behind layers",
    *(f"ultramem {kind}" for kind in ultramem_models.KINDS),
)
# Tables of each layer, with heads and without, and tables that layers share.
KINDS = by_default(
    ["headwise", "product-key", "linear", "token behind layers", "ultramem own", "ultramem ring"], ALL_KINDS
)


def acting(kind: str, dtype: torch.dtype = torch.float32, small: bool = False) -> Any:
    """Return a model whose memories of a kind act, in eval mode; a small one has few layers."""
    return CASES[kind].model("llama", None, dtype, small=small)  # type: ignore[arg-type]


def rounded(model: Any, folder: Path, bits: int = 8) -> Any:
    """Save a model, round its tables, and load the result."""
    model.save_pretrained(folder / "floats")
    quantise(EditRequest(folder / "floats", folder / "integers"), bits)
    return AutoModelForCausalLM.from_pretrained(folder / "integers")


def with_rows_that_integers_stand_for(model: Any, rounded: Any, bits: int) -> Any:
    """Return the model, each table of values replaced by what the integers of the rounded model stand for."""
    for module, other in zip(model.modules(), rounded.modules(), strict=True):
        for name in module.names_of("value") if isinstance(module, DeclaredModule) else ():
            integers, scales = getattr(other, f"{name}_integers"), getattr(other, f"{name}_scales")
            table = module.declared_tensor(name)
            table.data = dequantise_rows(integers, scales, bits, table.dtype)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]))
def test_a_pass_computes_with_the_rows_that_integers_stand_for(kind, dtype, bits, tmp_path):
    rounded(acting(kind, dtype), tmp_path, bits)
    # Loaded, since a model that is cast keeps angles of rotation in another dtype, and copied, since products of one row depend on
    # where weights are mapped.
    model, small = (
        copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("floats", "integers")
    )
    expected = with_rows_that_integers_stand_for(copy.deepcopy(model), small, bits)
    for tokens in (prompt(), prompt(1, 1)):  # many rows, of which a table may be all, and few
        with op_choices(backend="reference"):
            assert torch.equal(logits(small, tokens), logits(expected, tokens))
            assert not torch.equal(logits(small, tokens), logits(model, tokens))
    tokens = prompt(5)
    assert torch.equal(small.generate(tokens, **GREEDY), expected.generate(tokens, **GREEDY))
    tables = [tensor for name, tensor in model.named_parameters() if name.endswith(TABLES)]
    before, after = (sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers())) for one in (model, small))
    saved = sum(tensor.nbytes - tensor.numel() * bits // 8 - tensor.nbytes // tensor.shape[-1] for tensor in tables)
    assert before - after == saved > 0


_LOAD = """
import torch
from transformers import AutoModelForCausalLM
for name in ("headwise", "product-key", "ultramem ring"):
    model = AutoModelForCausalLM.from_pretrained(f"{name}/integers", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    with torch.no_grad():
        logits = model(torch.load("tokens.pt")).logits
    assert torch.equal(logits, torch.load(f"{name}/integers/logits.pt")), f"{name}: other logits"
"""


def test_saved_models_load_without_the_package(tmp_path):
    tokens = prompt(5)
    torch.save(tokens, tmp_path / "tokens.pt")
    for kind in ("headwise", "product-key", "ultramem ring"):
        model = rounded(acting(kind), tmp_path / kind)
        with op_choices(backend="reference"):
            torch.save(logits(model, tokens), tmp_path / kind / "integers" / "logits.pt")
    run_python(_LOAD, tmp_path, package_present=False)


def test_values_are_not_kept_expanded(tmp_path):
    model = rounded(acting("headwise"), tmp_path)
    with decode_cache(model), torch.no_grad():
        memories = [module for module in model.modules() if isinstance(module, MemoryModule)]
        assert memories and all(memory.decode_cache is None for memory in memories)


def test_few_slots_dequantise_their_rows_alone_and_many_the_table_once():
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    integers, scales = quantise_rows(table, 8)
    whole = dequantise_rows(integers, scales, 8, torch.float32)
    for slots, rows in ((torch.tensor([[5, 2]]), 2), (torch.tensor([[5, 2, 5, 0], [1, 1, 1, 1]]), 6)):
        read, places = gather_rows(integers, scales, 8, slots, torch.float32)
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
def test_a_model_is_exported_as_one_graph_for_any_number_of_tokens(kind, bits, tmp_path):
    model, tokens = acting(kind, small=True), prompt(7)
    if bits is not None:
        model = rounded(model, tmp_path, bits)
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with op_choices(backend="reference"):
        graph = torch.export.export(_LogitsOf(model), (tokens,), dynamic_shapes=sizes).module()
        for some in (tokens, prompt(4, 3)):
            assert torch.equal(graph(some), logits(model, some))


def _unfinite(model: Any) -> Any:
    table = next(tensor for name, tensor in model.named_parameters() if name.endswith("value_bank"))
    table.data[0, 0] = float("inf")
    return model


def _odd() -> Any:
    sizes = {"hidden_size": 36, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return upscaled_model("llama", acting=True, **sizes)


# The model, the memory and the bits that are asked for, and what is said.
REFUSED = {
    "bits": (lambda: acting("headwise"), None, 2, "bits is 2; expected 8 or 4"),
    "values": (lambda: acting("ngram"), None, 8, "'ngram' is of type 'ngram', whose values cannot be rounded.*--memory"),
    "no table": (lambda: upscaled_model("llama", new_layers=()), None, 8, "no table of values; expected a model with a mem"),
    "memory": (lambda: acting("headwise"), "other", 8, "memory is 'other'; expected .* the model has: headwise"),
    "infinite": (lambda: _unfinite(acting("product-key")), None, 8, "value_bank holds NaN or infinite values.*expected finite"),
    "odd": (_odd, None, 4, "value_bits is 4 and hidden_size / num_attention_heads is 9; expected an even width"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rounded_is_refused(case, tmp_path):
    make, memory, bits, message = REFUSED[case]
    make().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        quantise(EditRequest(tmp_path / "model", tmp_path / "out", memory), bits)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "kind", "option"), [("headwise", "headwise", "value_bits"), ("chunk", "chapters", "bank_bits")]
)
def test_a_model_of_integers_is_neither_rounded_again_nor_trained(case, kind, option, tmp_path):
    model = rounded(acting(case), tmp_path)
    with pytest.raises(ValueError, match=f"'{kind}' has {option} = 8 already; expected values that were not rounded"):
        quantise(EditRequest(tmp_path / "integers", tmp_path / "twice"), 4)
    with pytest.raises(ValueError, match=f"type '{kind}' has {option} = 8, which cannot be trained"):
        set_trainable(model, "new")


def test_memories_of_a_stack_are_rounded_together_or_one_by_name(tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    requests = (("midus-hml", {"n": 8}), ("moc", {"memory_tokens": 8, "chapters": 4, "k": 1}), ("midus-hml", {"n": 8}))
    for number, (method, options) in enumerate(requests):
        upscale(base=base, method=method, output=tmp_path / f"{number}", options=options, verify=False)
        base = tmp_path / f"{number}"
    quantise(EditRequest(base, tmp_path / "all"), 4)
    quantise(EditRequest(base, tmp_path / "one", "chapters"))
    read = {name: AutoConfig.from_pretrained(tmp_path / name).memory for name in ("all", "one")}
    bits = {name: [entry.get("value_bits", entry.get("bank_bits")) for entry in read[name]] for name in read}
    assert bits["all"] == [4, 4, 4] and sorted(map(str, bits["one"])) == ["8", "None", "None"]
    strip(tmp_path / "all", tmp_path / "stripped")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stripped")
    assert {module.options.type for module in model.modules() if isinstance(module, MemoryModule)} == {
        "headwise",
        "chapters",
    }
    assert sum(name.endswith("_integers") for name, _ in model.named_buffers()) == sum(
        name.endswith(TABLES) for name, _ in AutoModelForCausalLM.from_pretrained(tmp_path / "1").named_parameters()
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("midus-hml", {"n": 8, "value_bits": 8}),
        ("moc", {"memory_tokens": 8, "chapters": 4, "k": 1, "bank_bits": 8}),
    ],
)
def test_no_model_is_upscaled_with_integers(method, options, tmp_path):
    save_tiny_model("llama", tmp_path / "base")
    with pytest.raises(ValueError, match=r"_bits is 8, but new values have to be trained.*midus edit quantise"):
        upscale(base=tmp_path / "base", method=method, output=tmp_path / "out", options=options)


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
