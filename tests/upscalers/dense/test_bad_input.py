"""What bad input gets from dense methods: status 2, one line with value, expectation and remedy, and nothing written."""

import json

import pytest

from tests.upscalers.checkpoints import SMALL_MEMORY, read_tensors, save_base, write_tensors
from tests.upscalers.dense.requests import settings
from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.runs.upscale import upscale

ONLY_CONFIG = "llama-3.2-1b"
"""A base of which there is no more than its config."""

IDENTITY = "identity is {}; expected one of: auto, zero_out_proj, zero_out_norm, none."
NO_NORMS = (
    "identity is 'zero_out_norm', but llama has no norm behind its projections; expected 'zero_out_proj' or 'auto'."
)
ORDERED = (
    "placement is {}, but solar orders the layers itself; expected none. Pass --num-new-layers, or use method slices."
)
COUNT = (
    "num-new-layers is {}; solar leaves the same number of layers out of each of its two stacks, so expected K with "
    "0 < K < {}"
)
ONE_SIDE = (
    "new layer {} has no base layer {} it; expected one on each side, since both are fused. Choose placement top-heavy, "
    "or indices inside the model."
)
MEMORY = (
    "new layer {} would be made from base layer {}, which is a memory block; expected a layer with a feed-forward "
    "network. Choose other layers or another placement."
)
MIXED = (
    "new layers 2, 4 fuse sliding and full attention, whose rotary embeddings and windows may differ. {} It is an error "
    "since strict is set."
)
OF_ITS_TYPE = (
    r"new layer 1 stands before base layer 1 \(full_attention\), and no layer before it attends like it; expected one, "
    "since neighbours is 'same_type'. Choose another placement, or neighbours=adjacent."
)
NO_MAPPING = "coefficients is {}; expected a mapping such as {{previous: 0.5, next: 0.5}}, or a list with one for each new layer."
NO_LAYER = (
    "coefficients names the layer {}; expected the index of a base layer, or previous or next, such as previous-1."
)
NO_COEFFICIENT = "the coefficient of layer {} is {}; expected a finite number."
MAPPINGS = "coefficients lists {} mappings for 2 new layers; expected one for each, or a single mapping for all."
WITHOUT = (
    "coefficients names {} for new layer {}, which stands {}; expected base layers from 0 to 3. Choose another placement "
    "or other layers."
)
NO_SCALE = "scale is {}; expected a mapping of roles to numbers, such as .down: 0.5.."
NO_ROLE = "names the role '{}', which no tensor of a llama layer has. {}"
NO_SLICES = (
    r"slices is {}; expected a list such as \[.layers: \[0, 12\]., .layers: \[4, 16\].\]. Give it in a --config file under "
    "options."
)
NO_SLICE = r"slices holds something that is no mapping; expected .layers: \[first, end\]. in each place."
NO_BOUNDS = r"a slice has layers = {}; expected \[first, end\], the end not included."
BOUNDS = "a slice has layers = {}; expected 0 <= first < end <= 4, the number of base layers. The end is not included."
UNCHANGED = "the slices are the base as it is; expected a layer more, less or changed."
NOTHING_NEW = "trainable is 'new', but the slices repeat and scale nothing; expected 'all'."
SAID_BY_SLICES = "{} is {}, but slices say which layers there are; expected none."

SOLAR = [
    ("llama", ["--placement", "top-heavy"], ORDERED.format("'top-heavy'")),
    ("llama", ["--placement", "1,4"], ORDERED.format("'1,4'")),
    ("two layers", [], "the base has 2 layers; solar needs at least 3 to leave some out of each stack."),
    *(("llama", ["--num-new-layers", k], COUNT.format(k, "4 and 4 - K even. The nearest: 2.")) for k in ("1", "3", "0", "4", "-2")),
    (ONLY_CONFIG, ["--num-new-layers", "7"], COUNT.format(7, "16 and 16 - K even. The nearest: 6 and 8.")),
    (ONLY_CONFIG, ["--num-new-layers", "40"], COUNT.format(40, "16 and 16 - K even. The nearest: 12 and 14.")),
    ("llama", ["--set", "identity=auto"], "method solar has no option 'identity'. It has none."),
]  # fmt: skip
LLAMA_PRO = [
    ("llama", ["--set", "identity=zero_out_norm"], NO_NORMS),
    ("llama", ["--set", "identity=zero"], IDENTITY.format("'zero'")),
    ("llama", ["--set", "identity=null"], IDENTITY.format(None)),
    ("llama", ["--set", "identify=auto"], "method llama-pro has no option 'identify'. Did you mean 'identity'"),
    ("llama", ["--num-new-layers", "3"], "num-new-layers is 3; placement llama-pro needs a divisor of the 4"),
    ("memory", ["--placement", "2"], MEMORY.format(2, 1)),
]  # fmt: skip
AVG_DEUS = [
    ("llama", ["--set", "identity=zero_out_norm"], NO_NORMS),
    ("llama", ["--placement", "0,3"], ONE_SIDE.format(0, "before")),
    ("llama", ["--placement", "llama-pro"], ONE_SIDE.format(5, "after")),
    ("llama", ["--placement", "bottom-heavy"], ONE_SIDE.format(0, "before")),
    ("llama", ["--set", "neighbours=same"], "neighbours is 'same'; expected one of: adjacent, same_type."),
    ("llama", ["--set", "strict=perhaps"], "strict is 'perhaps'; expected true or false"),
    ("gemma2", ["--set", "strict=true"], MIXED.format("Pass neighbours=same_type to avoid it.")),
    ("gemma2", ["--placement", "1", "--set", "neighbours=same_type"], OF_ITS_TYPE),
    ("memory", ["--placement", "1"], MEMORY.format(1, 1)),
    ("memory", ["--placement", "2"], MEMORY.format(2, 1)),
    ("two layers", ["--num-new-layers", "2"], "num-new-layers is 2; placement top-heavy fits at most 1, one in each gap"),
]  # fmt: skip
LINEAR_COMBINATION = [
    ("llama", ["--set", "coefficients=half"], NO_MAPPING.format("'half'")),
    ("llama", ["--set", "coefficients="], NO_MAPPING.format("None")),
    ("llama", ["--set", "coefficients=[]"], NO_MAPPING.format(r"\[\]")),
    ("llama", ["--set", "coefficients={}"], NO_MAPPING.format(r"\{\}")),
    ("llama", ["--set", "coefficients=[{previous: 1}, {}]"], NO_MAPPING.format(r"\[\{'previous': 1\}, \{\}\]")),
    ("llama", ["--set", "coefficients=[{previous: 1}, 2]"], NO_MAPPING.format(r"\[\{'previous': 1\}, 2\]")),
    ("llama", ["--set", "coefficients={prev: 1}"], NO_LAYER.format("'prev'")),
    ("llama", ["--set", "coefficients={next*2: 1}"], NO_LAYER.format(r"'next\*2'")),
    ("llama", ["--set", "coefficients={0.5: 1}"], NO_LAYER.format(0.5)),
    ("llama", ["--set", "coefficients={true: 1}"], NO_LAYER.format(True)),
    ("llama", ["--set", "coefficients={previous: half}"], NO_COEFFICIENT.format("previous", "'half'")),
    ("llama", ["--set", "coefficients={0: true}"], NO_COEFFICIENT.format(0, True)),
    ("llama", ["--set", "coefficients={next: null}"], NO_COEFFICIENT.format("next", None)),
    ("llama", ["--set", "coefficients=[{previous: 1}]"], MAPPINGS.format(1)),
    ("llama", ["--set", "coefficients=[{next: 1}, {next: 1}, {next: 1}]"], MAPPINGS.format(3)),
    ("llama", ["--set", "coefficients={4: 1}"], WITHOUT.format(4, 2, "between base 1 and base 2")),
    ("llama", ["--set", "coefficients={-1: 1}"], WITHOUT.format(-1, 2, "between base 1 and base 2")),
    ("llama", ["--set", "coefficients={previous-2: 1}"], WITHOUT.format("previous-2", 2, "between base 1 and base 2")),
    ("llama", ["--set", "coefficients={next+1: 1}"], WITHOUT.format(r"next\+1", 4, "between base 2 and base 3")),
    ("llama", ["--placement", "0"], WITHOUT.format("previous", 0, "beside base 0")),
    ("llama", ["--placement", "4"], WITHOUT.format("next", 4, "beside base 3")),
    ("llama", ["--set", "identity=zero_out_norm"], NO_NORMS),
    ("gemma2", ["--set", "strict=true"], MIXED.format("Name layers of one type in coefficients.")),
    ("memory", ["--placement", "3", "--set", "coefficients={4: 1}"], MEMORY.format(3, 4)),
]  # fmt: skip
ATTENUATED_COPY = [
    ("llama", ["--set", "scale=0.5"], NO_SCALE.format(0.5)),
    ("llama", ["--set", "scale=[down]"], NO_SCALE.format(r"\['down'\]")),
    ("llama", ["--set", "scale={1: 0.5}"], NO_SCALE.format(r"\{1: 0.5\}")),
    ("llama", ["--set", "scale={down: half}"], "scale.down is 'half'; expected a finite number."),
    ("llama", ["--set", "scale={down: false}"], "scale.down is False; expected a finite number."),
    ("llama", ["--set", "scale={down:}"], "scale.down is None; expected a finite number."),
    ("llama", ["--set", "scale={o_proj: 0.5}"], NO_ROLE.format("o_proj", "Did you mean 'output_projection'")),
    ("llama", ["--set", "scale={quary: 0.5}"], NO_ROLE.format("quary", "Did you mean 'query'")),
    ("llama", ["--set", "scale={mlp_output_norm: 0.5}"], NO_ROLE.format("mlp_output_norm", "Expected one of: attention_norm, down")),
    ("memory", ["--placement", "2"], MEMORY.format(2, 1)),
]  # fmt: skip
SLICES = [
    ("llama", [], NO_SLICES.format("None")),
    ("llama", ["--set", "slices=[]"], NO_SLICES.format(r"\[\]")),
    ("llama", ["--set", "slices={layers: [0, 2]}"], NO_SLICES.format(r"\{'layers': \[0, 2\]\}")),
    ("llama", ["--set", "slices=[[0, 2]]"], NO_SLICE),
    ("llama", ["--set", "slices=[{layer: [0, 2]}]"], "a slice has no option 'layer'. Did you mean 'layers'"),
    ("llama", ["--set", "slices=[{}]"], NO_BOUNDS.format("None")),
    ("llama", ["--set", "slices=[{layers: 2}]"], NO_BOUNDS.format("2")),
    ("llama", ["--set", "slices=[{layers: [0, 2, 4]}]"], NO_BOUNDS.format(r"\[0, 2, 4\]")),
    ("llama", ["--set", "slices=[{layers: [0, '2']}]"], NO_BOUNDS.format(r"\[0, '2'\]")),
    ("llama", ["--set", "slices=[{layers: [0, 2.0]}]"], NO_BOUNDS.format(r"\[0, 2.0\]")),
    ("llama", ["--set", "slices=[{layers: [false, true]}]"], NO_BOUNDS.format(r"\[False, True\]")),
    ("llama", ["--set", "slices=[{layers: [0, 5]}]"], BOUNDS.format(r"\[0, 5\]")),
    ("llama", ["--set", "slices=[{layers: [2, 2]}]"], BOUNDS.format(r"\[2, 2\]")),
    ("llama", ["--set", "slices=[{layers: [3, 1]}]"], BOUNDS.format(r"\[3, 1\]")),
    ("llama", ["--set", "slices=[{layers: [-1, 2]}]"], BOUNDS.format(r"\[-1, 2\]")),
    ("llama", ["--set", "slices=[{layers: [0, 2], scale: 2}]"], f"the scale of a slice is 2; {NO_SCALE.partition('; ')[2]}"),
    ("llama", ["--set", "slices=[{layers: [0, 2], scale: {up: x}}]"], "the scale of a slice.up is 'x'; expected a finite number."),
    ("llama", ["--set", "slices=[{layers: [0, 2], scale: {u: 2}}]"], f"the scale of a slice {NO_ROLE.format('u', '')}"),
    ("llama", ["--set", "slices=[{layers: [0, 4]}]"], UNCHANGED),
    ("llama", ["--set", "slices=[{layers: [0, 1]}, {layers: [1, 4], scale: {up: 1}}]"], UNCHANGED),
    ("llama", ["--set", "slices=[{layers: [0, 3]}]", "--set", "trainable=new"], NOTHING_NEW),
    ("llama", ["--set", "slices=[{layers: [0, 3]}]", "--set", "trainable=some"], "trainable is 'some'; expected one of: all, new."),
    ("llama", ["--set", "slices=[{layers: [0, 3]}]", "--num-new-layers", "2"], SAID_BY_SLICES.format("num-new-layers", 2)),
    ("llama", ["--set", "slices=[{layers: [0, 3]}]", "--placement", "1"], SAID_BY_SLICES.format("placement", "'1'")),
    ("memory", ["--set", "slices=[{layers: [0, 6]}, {layers: [0, 2], scale: {up: 2}}]"], MEMORY.format(7, 1)),
]  # fmt: skip
PRESETS = [
    ("llama", ["--set", "preset=relase"], "preset is 'relase'; expected one of: release."),
    ("llama", ["--set", "preset=1"], "preset is 1; expected one of: release."),
    ("llama", ["--set", "preset=[release]"], r"preset is \['release'\]; expected one of: release."),
    ("llama", ["--set", "prest=release"], "method .* has no option 'prest'. Did you mean 'preset'"),
    ("llama", ["--set", "presets=release"], "method .* has no option 'presets'. Did you mean 'preset'"),
]  # fmt: skip
NO_PRESETS = [("llama", ["--set", "preset=release"], "method .* has no option 'preset'")]
REQUESTS = {
    "solar": SOLAR,
    "llama-pro": LLAMA_PRO,
    "avg-deus": AVG_DEUS + NO_PRESETS,
    "linear-combination": LINEAR_COMBINATION + NO_PRESETS,
    "attenuated-copy": ATTENUATED_COPY,
    "slices": SLICES,
    "lesa": PRESETS,
    "opt-deus": PRESETS,
}
DENSE = ("solar", "llama-pro", "avg-deus", "linear-combination", "attenuated-copy", "slices")
CASES = [(method, *case) for method, cases in REQUESTS.items() for case in cases]


@pytest.fixture(scope="module")
def bases(tmp_path_factory, shared_base):
    """A folder by the name that the table calls it."""
    folder = tmp_path_factory.mktemp("bases")
    upscale(base=shared_base("llama"), method="midus-hml", output=folder / "memory", options=SMALL_MEMORY)
    save_base(folder / "two layers", num_hidden_layers=2)
    write_config(folder / ONLY_CONFIG, LLAMA_3_2_1B)
    known = {path.name: path for path in folder.iterdir()}
    return lambda name: known.get(name) or shared_base(name)


@pytest.mark.parametrize(
    ("method", "base_name", "arguments", "message"),
    CASES,
    ids=[f"{method} {base} {' '.join(arguments)}" for method, base, arguments, _ in CASES],
)
def test_a_request_that_makes_no_sense_is_refused(
    method, base_name, arguments, message, bases, tmp_path, command, refused
):
    usual = ("--base", bases(base_name), "--method", method, *arguments)
    refused(command(*usual, "--dry-run"), message, [])
    if base_name != ONLY_CONFIG:
        refused(command(*usual, "--output", tmp_path / "out"), message, [])


@pytest.mark.parametrize(
    ("chosen", "norm_init"),
    [
        ([], "layer0"),
        (["norm_init=mean"], "mean"),
        (["preset=release"], "layer0"),
        (["preset=release", "norm_init=next"], "next"),
        (["norm_init=next", "preset=release"], "next"),
        (["preset="], "layer0"),
    ],
    ids=str,
)
def test_a_preset_stands_for_options_and_those_that_are_given_win(chosen, norm_init, base, tmp_path, command):
    given = [word for setting in (*chosen, "epochs=1") for word in ("--set", setting)]
    outcome = command("--base", base, "--method", "lesa", "--output", tmp_path / "out", "--no-verify", *given)
    assert outcome.status == 0, outcome.err
    options = json.loads((tmp_path / "out" / "config.json").read_text())["upscale"]["options"]
    assert (options["norm_init"], options["epochs"]) == (norm_init, 1)
    assert "preset" not in options


@pytest.mark.parametrize("method", DENSE)
def test_nan_in_the_base_is_refused_unless_it_is_allowed(method, tmp_path, command, refused):
    base = save_base(tmp_path / "base")
    tensors = read_tensors(base)
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = float("nan")
    write_tensors(base, tensors)
    usual = ("--base", base, "--method", method, *settings(method), "--output", tmp_path / "out")
    message = (
        "model.layers.2.mlp.down_proj.weight holds NaN; expected finite weights. Repair the base, or pass --allow-nan"
    )
    refused(command(*usual), message, ["base"])
    assert command(*usual, "--allow-nan").status == 0


def test_a_scale_without_effect_is_warned_of(shared_base, tmp_path, command):
    usual = ("--method", "attenuated-copy", "--placement", "whole-periods", "--dry-run", "--set")
    halves = "scale={output_projection: 0.5, down: 0.5, up: 0.5}"
    outcome = command("--base", shared_base("gemma2"), *usual, halves)
    assert outcome.status == 0
    assert outcome.err.splitlines() == [
        f"upscale: warning: scale.{role} changes nothing in gemma2: a norm follows. Scale {norm} instead."
        for role, norm in (("output_projection", "attention_output_norm"), ("down", "mlp_output_norm"))
    ]
    assert command("--base", shared_base("llama"), *usual, halves).err == ""
    without = "scale={output_projection: 0, down: 1}"
    assert command("--base", shared_base("gemma2"), *usual, without).err == ""
