"""What a class says of identity is what its blocks are, or it is not registered."""

from dataclasses import dataclass

import pytest
import torch

from midus_hf.config.options import option
from tests.upscalers.checkpoints import logits, read_tensors
from upscalers.methods.contract import METHODS, get_method, register_method
from upscalers.methods.dense_block import IDENTITY_HELP, DenseMethod, IdentityInit
from upscalers.request.errors import VerificationError
from upscalers.runs.upscale import upscale


@pytest.fixture
def registry():
    """The table of methods, as it was when the test is over."""
    get_method("llama-pro")
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)


class Copies(DenseMethod):
    """Copies of the next layer."""

    summary = "copies"
    paper = None


def test_every_method_of_the_package_passes_the_check_of_those_of_other_packages(registry):
    assert len(registry) >= 16
    for name, method in registry.items():
        method.check_declaration(name)


@pytest.mark.parametrize("verify", [True, False])
def test_a_class_that_promises_identity_and_has_no_option_is_the_identity(
    registry, native_family, verify, shared_base, tmp_path
):
    register_method("silent-copies")(type("SilentCopies", (Copies,), {"identity": True}))
    base = shared_base(native_family)
    report = upscale(base=base, method="silent-copies", output=tmp_path / "out", verify=verify)
    assert report.promises_identity
    assert report.identity.checked == ("logits" if verify else "blocks")
    assert torch.equal(logits(base), logits(tmp_path / "out"))


def test_a_class_that_names_no_sources_takes_the_next_layer_and_behind_the_last_the_one_before(
    registry, base, tmp_path
):
    register_method("plain-copies")(type("PlainCopies", (Copies,), {"identity": False}))
    upscale(base=base, method="plain-copies", output=tmp_path / "out", placement=[2, 5])
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    name = "model.layers.{}.self_attn.q_proj.weight"
    for index, source in {2: 2, 3: 2, 5: 3}.items():
        assert torch.equal(new[name.format(index)], old[name.format(source)])


@pytest.mark.parametrize("verify", [True, False])
def test_a_promise_that_its_recipes_do_not_keep_is_found_out(registry, base, tmp_path, verify):
    whole = {
        "identity": True,
        "new_layer_recipes": lambda self, base, layer, *_: self.copied_layer(base, layer.sources[0]),
    }
    register_method("false-promise")(type("FalsePromise", (Copies,), whole))
    with pytest.raises(VerificationError):
        upscale(base=base, method="false-promise", output=tmp_path / "out", verify=verify)
    assert list(tmp_path.iterdir()) == []


@dataclass
class ByDefault:
    """Options that make the identity."""

    identity: IdentityInit = option("auto", IDENTITY_HELP)


@dataclass
class OnRequest:
    """Options that make it only if asked."""

    identity: IdentityInit = option("none", IDENTITY_HELP)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"identity": True, "options_class": OnRequest},
            "method x has identity = True, but its option identity is 'none' by default; expected auto, zero_out_proj or",
        ),
        (
            {"identity": False, "options_class": ByDefault},
            "method x has identity = False, but its option identity is 'auto' by default; expected none. Change one of",
        ),
        ({"identity": "auto"}, "method x has identity = 'auto'; expected True or False: whether, with the default"),
        ({}, "method x has identity = None; expected True or False"),
    ],
    ids=str,
)
def test_a_class_that_contradicts_itself_is_not_registered(registry, attributes, message):
    before = dict(registry)
    with pytest.raises(ValueError, match=message):
        register_method("x")(type("X", (Copies,), attributes))
    assert registry == before


@pytest.mark.parametrize(("identity", "options"), [(True, ByDefault), (False, OnRequest)])
def test_a_class_that_agrees_with_its_option_is_registered(registry, identity, options):
    register_method("x")(type("X", (Copies,), {"identity": identity, "options_class": options}))
    assert registry["x"].identity is identity
