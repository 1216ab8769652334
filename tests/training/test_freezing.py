"""The new layers train, whole and alone, or the layers that were listed do, or everything does."""

import re

import pytest
from training.tiny_run import NEW_LAYERS, refused
from transformers import AutoConfig, AutoModelForCausalLM

from midus_hf.training.optim import resolve_trainable, set_trainable

EVERY = [0, 1, 2, 3, 4, 5]


@pytest.fixture
def load(upscaled, native):
    """Return what gives a model with memory in its new layers, or one of its family's own class, with another record of training."""

    def model(kind: str = "upscaled", family: str = "llama", **record):
        loaded = AutoModelForCausalLM.from_pretrained({"upscaled": upscaled, "native": native}[kind](family))
        if record:
            loaded.config.upscale = record["upscale"]
        return loaded

    return model


def what_trains(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "trainable", "means", "layers", "summary"),
    [
        ("upscaled", "new", "new", NEW_LAYERS, "new"),
        ("upscaled", "auto", "new", NEW_LAYERS, "new"),
        ("native", "auto", "new", NEW_LAYERS, "new"),
        ("native", [5, 0, 2], [5, 0, 2], [0, 2, 5], "5, 0, 2"),
        ("upscaled", "all", "all", EVERY, "all"),
        ("recorded", "auto", "all", EVERY, "all"),
    ],
    ids=str,
)
def test_only_chosen_layers_train(kind, trainable, means, layers, summary, family, load):
    model = load("native" if kind == "recorded" else kind, family)
    if kind == "recorded":
        model.config.upscale["trainable"] = "all"
    set_trainable(model, "new" if trainable == "all" else "all")
    report = set_trainable(model, trainable)
    every = {name for name, _ in model.named_parameters()}
    inside = tuple(f"model.layers.{layer}." for layer in layers)
    assert what_trains(model) == (every if layers == EVERY else {name for name in every if name.startswith(inside)})
    assert (report.trainable, report.layers, report.num_layers) == (means, layers, 6)
    assert report.parameters == sum(model.get_parameter(name).numel() for name in what_trains(model))
    assert report.total_parameters == model.num_parameters()
    text = str(report)
    if layers != EVERY:
        assert f"Training {summary}: {report.parameters:,} of {report.total_parameters:,} parameters" in text
        assert f"in layers {', '.join(map(str, layers))} of 6" in text
    assert f"Training {summary}: " in text


@pytest.mark.parametrize("roles", [["value"], ["key", "value"], ["transform"]], ids=str)
def test_roles_name_tensors_of_the_new_memories(load, roles):
    model = load()
    names = {"key": {"row_keys", "column_keys"}, "value": {"value_bank"}, "transform": {"value_transform"}}
    report = set_trainable(model, roles)
    expected = set().union(*(names[role] for role in roles))
    assert {name.rpartition(".")[2] for name in what_trains(model)} == expected
    assert all(".memory." in name for name in what_trains(model))
    assert report.layers == NEW_LAYERS


def test_roles_can_be_kept_from_training(load):
    model = load()
    every = set_trainable(model, "all") and what_trains(model)
    report = set_trainable(model, "all", frozen=["value"])
    values = {name for name in every if name.endswith("value_bank")}
    assert what_trains(model) == every - values != every
    assert report.parameters == report.total_parameters - sum(model.get_parameter(name).numel() for name in values)
    assert "Training all without the value tensors of memories: " in str(report)


WORDS = "expected 'auto', 'new', 'all', a list of layer indices, or one of roles"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            ("native", {"upscale": record, "trainable": "auto"}, "and this llama model is a base, not an upscaled model: ")
            for record in (None, {"trainable": ["new"]})
        ),
        *(
            ("native", {"trainable": layers}, f"is {layers}; expected layers of this llama model (0 <= layer < 6), at least one")
            for layers in ([], [3, 1, 3], [-1, 2])
        ),
        *(
            ("upscaled", {"upscale": record, "trainable": "new"}, "or set trainable: all")
            for record in (None, {"new_layers": []})
        ),
        ("upscaled", {"upscale": {"new_layers": [1, 6]}, "trainable": "new"}, "names [6], which the model does not have."),
        *(
            ("upscaled", {"trainable": trainable}, f"trainable is {trainable!r}; {WORDS}")
            for trainable in ("none", None, [True])
        ),
        ("upscaled", {"trainable": ["router"]}, "is ['router'], but the new memories of this midus_llama model have no"),
        (
            "upscaled",
            {"trainable": "new", "frozen": ["router"]},
            "frozen is ['router'], but this midus_llama model has no memory tensors of the role 'router' that would",
        ),
        (
            "upscaled",
            {"trainable": [0], "frozen": ["value"]},
            "no memory tensors of the role 'value' that would train; leave the role out.",
        ),
        (
            "upscaled",
            {"trainable": ["value"], "frozen": ["value"]},
            "frozen is ['value'], which leaves nothing to train; freeze less, or set trainable: all.",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_train_is_refused(kind, options, message, load):
    model = load(kind, **{key: value for key, value in options.items() if key == "upscale"})
    with refused(re.escape(message)):
        set_trainable(model, *(options[key] for key in ("trainable", "frozen") if key in options))
    if kind == "native":
        assert what_trains(model) == {name for name, _ in model.named_parameters()}, "nothing was frozen"


def test_packs_alone_have_nothing_to_train():
    memory = [{"type": "packs", "layers": [0]}]
    upscale = {"trainable": "new", "new_layers": [], "new_memories": ["packs"]}
    config = AutoConfig.for_model("midus_llama", num_hidden_layers=2, memory=memory, upscale=upscale)
    message = (
        "trainable is 'auto' (what upscale added), and packs add texts, no parameters; expected some to train. Set trainable: "
        "all, or adapters, such as adapters: {r: 16}."
    )
    with refused(re.escape(message)):
        resolve_trainable(config, "auto")
