"""Methods that promise identity compute what the base computes, bit for bit; the others promise nothing."""

import itertools
from functools import cache

import pytest
import torch
from pairs import by_default
from tiny import WINDOW, prompt

from tests.upscalers.checkpoints import load, save_base
from tests.upscalers.dense.requests import OUTPUT_NORMS, PROMISING, REQUESTS, upscaled
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.upscale import upscale

BIASES = [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
DTYPES = ["float32", "bfloat16", "float16"]
EXACT, OTHERWISE = "It computes exactly what the base computes", "It is not promised to compute what the base computes"


def identities(family: str) -> list[str]:
    """Values of the option `identity` that promise it for a family."""
    return ["auto", "zero_out_proj"] + (["zero_out_norm"] if family in OUTPUT_NORMS else [])


@cache
def computed(folder) -> tuple[torch.dtype, torch.Tensor, torch.Tensor]:
    """The dtype of a model, its logits, and what it generates with its cache after a prompt longer than the window."""
    model, tokens = load(folder), prompt()
    assert tokens.shape[1] > WINDOW
    with torch.no_grad():
        values = model(tokens).logits
    text = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
    assert text.shape[1] == tokens.shape[1] + 4
    return model.dtype, values, text


def same(base, output) -> bool:
    return all(
        torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        for left, right in zip(computed(base), computed(output), strict=True)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base of a family in a dtype, saved once."""

    @cache
    def base(family: str, dtype: str):
        return save_base(tmp_path_factory.mktemp("base") / f"{family}-{dtype}", family, getattr(torch, dtype))

    return base


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", PROMISING)
def test_logits_and_generated_tokens_are_the_bases_whatever_makes_the_identity(
    native_family, method, dtype, saved, tmp_path
):
    base = saved(native_family, dtype)
    for identity in identities(native_family):
        options = {**REQUESTS[method].get("options", {}), "identity": identity}
        report = upscaled(base, tmp_path / identity, method, options=options)
        assert (report.identity.checked, report.identity.max_abs_diff) == ("blocks", 0.0)
        assert report.promises_identity
        assert same(base, tmp_path / identity), identity
        assert EXACT in (tmp_path / identity / "README.md").read_text()


@pytest.mark.parametrize("placement", ["bottom-heavy", "top-heavy", "distributed", "llama-pro", "0,1,2,7,8"])
def test_llama_pro_is_the_identity_wherever_its_layers_stand(native_family, placement, saved, tmp_path):
    base = saved(native_family, "float32")
    report = upscaled(base, tmp_path / "out", "llama-pro", placement=placement, verify=True)
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert same(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "biases", "tied"),
    by_default(
        [(method, BIASES[number % 3], bool(number % 2)) for number, method in enumerate(PROMISING)]
        + [("llama-pro", biases, False) for biases in BIASES],
        itertools.product(PROMISING, BIASES, [True, False]),
    ),
    ids=str,
)
def test_biases_behind_zero_projections_are_zero_as_well(tmp_path, method, biases, tied):
    base = save_base(tmp_path / "base", tie_word_embeddings=tied, **biases)
    upscaled(base, tmp_path / "out", method, options={"identity": "auto"})
    assert same(base, tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_and_untied_heads_are_kept(native_family, tied, tmp_path):
    base = save_base(tmp_path / "base", native_family, tie_word_embeddings=tied)
    upscaled(base, tmp_path / "out", "llama-pro")
    assert same(base, tmp_path / "out")
    model = load(tmp_path / "out")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("method", [method for method in REQUESTS if PROMISING.get(method) != "auto"])
def test_what_is_no_identity_is_not_claimed_to_be_one(native_family, method, saved, tmp_path):
    base = saved(native_family, "float32")
    report = upscaled(base, tmp_path / "out", method, verify=True)
    assert not report.promises_identity
    assert report.identity.checked == "logits"
    assert report.identity.max_abs_diff > 0 and report.kl_divergence > 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert EXACT not in card and OTHERWISE in card
    assert not same(base, tmp_path / "out")


@pytest.mark.parametrize("method", [method for method in REQUESTS if PROMISING.get(method) != "auto"])
def test_a_method_without_identity_runs_unverified_and_says_that_nothing_was_checked(method, base, tmp_path, command):
    report = upscaled(base, tmp_path / "out", method)
    assert (report.identity.checked, report.identity.max_abs_diff, report.kl_divergence) == (None, None, None)
    assert not report.promises_identity
    recipe = (tmp_path / "out" / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe.yaml").write_text(recipe)
    told = command("--config", tmp_path / "recipe.yaml", "--base", base, "--output", tmp_path / "again", "--no-verify")
    assert told.status == 0
    assert "not promised by the method; not checked" in " ".join(told.out.split())


@pytest.mark.parametrize("method", PROMISING)
def test_the_option_decides_what_is_promised(method, base):
    for identity, promised in (("auto", True), ("zero_out_proj", True), ("none", False)):
        report = upscale(base=base, method=method, options={"identity": identity}, dry_run=True)
        assert report.promises_identity == promised
    assert upscale(base=base, method=method, dry_run=True).promises_identity == (PROMISING[method] == "auto")


def test_llama_pro_without_identity_is_a_plain_copy_and_promises_nothing(native_family, saved, tmp_path):
    report = upscaled(saved(native_family, "float32"), tmp_path / "out", "llama-pro", options={"identity": "none"})
    assert not report.promises_identity
    assert not same(saved(native_family, "float32"), tmp_path / "out")
    assert inspect_checkpoint(tmp_path / "out")["options"] == {"identity": "none"}
