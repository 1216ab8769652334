"""Pictures of methods that add layers: the stack before and after, from the method's own plan for a base of four layers."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs.pictures.canvas import BLUE, FAINT, RED, SMALL, Box, Picture
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.methods.contract import get_method
from upscalers.plan import Base, Plan
from upscalers.request import parse_options

BASE_LAYERS, NEW_LAYERS = 4, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": BASE_LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def plan_of(method: str) -> Plan:
    """Return a method's plan for two new layers in a base of four, with default options."""
    method_class = get_method(method)
    chosen = method_class(parse_options(method_class.options_class, {}, f"method {method}"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        base = open_base(Path(folder), needs_weights=False)
        return chosen.plan(base, NEW_LAYERS, None)


def stack(
    picture: Picture, x: float, bottom: float, labels: Sequence[tuple[str, str]], width: float = 96, step: float = 38
) -> list[Box]:
    """Draw layers on the residual stream, from the bottom up, and return their boxes.

    Args:
        picture: The picture to draw on.
        x: Left edge of the layers.
        bottom: Lower edge of the first layer.
        labels: Text and kind of each layer.
        width: Width of a layer. Default: 96.
        step: Distance of two layers. Default: 38.
    """
    picture.stream(x + width / 2, bottom - 16, bottom + len(labels) * step + 2)
    return [
        picture.box(x, bottom + number * step, width, 25, text, kind) for number, (text, kind) in enumerate(labels)
    ]


def before_and_after(picture: Picture, plan: Plan, bottom: float, new: str = "") -> list[Box]:
    """Draw the layers of the base, the layers of the result, and arrows from the layers that each layer is made from.

    Args:
        picture: The picture to draw on.
        plan: Origin of the layers of the result.
        bottom: Lower edge of the first layers.
        new: Label of new layers, with `{}` for the layers that they are made from.

    Returns:
        The boxes of the result's layers.
    """
    picture.title(14, "Base")
    picture.title(150, "Result")
    base = stack(picture, 14, bottom + 38, [(f"layer {layer}", "base") for layer in range(plan.num_base_layers)], 80)
    labels = []
    for index, layer in enumerate(plan.layers):
        is_new = index in plan.new_indices
        text = f"layer {layer.index}" if isinstance(layer, Base) else new.format(*sorted(layer.sources))
        labels.append((f"{text} again" if is_new and isinstance(layer, Base) else text, "new" if is_new else "base"))
    result = stack(picture, 150, bottom, labels, 104)
    for index, layer in enumerate(plan.layers):
        is_new = index in plan.new_indices
        sources = (layer.index,) if isinstance(layer, Base) else layer.sources
        for source in sources:
            picture.arrow(base[source].right, result[index].left, color=BLUE if is_new else "#b6bfca")
    return result


def solar() -> Picture:
    """Draw two overlapping stacks of the base."""
    picture = Picture(306)
    plan = plan_of("solar")
    result = before_and_after(picture, plan, 52)
    seam = plan.new_indices[0]
    below, above = plan.layers[seam - 1], plan.layers[seam]
    assert isinstance(below, Base) and isinstance(above, Base)
    y = (result[seam - 1].top[1] + result[seam].bottom[1]) / 2
    picture.arrow((262, y), (300, y), color=RED, tip=False)
    picture.text(308, y, f"seam: layer {above.index} reads what layer {below.index} wrote", SMALL, RED, "left")
    for first, last, name in (
        (0, seam - 1, "the base without its last $m$ layers:  $0\\,...\\,L - m - 1$"),
        (seam, plan.num_layers - 1, "the base without its first $m$ layers:  $m\\,...\\,L - 1$"),
    ):
        low, high = result[first].y, result[last].y + 25
        picture.arrow((266, low), (272, low), (272, high), (266, high), tip=False)
        picture.text(282, (low + high) / 2, name, ha="left")
    picture.text(
        282,
        250,
        f"$m = (L - K)\\ /\\ 2$  for $K$ layers more;  here {(BASE_LAYERS - NEW_LAYERS) // 2}",
        SMALL,
        FAINT,
        "left",
    )
    picture.legend("base", "new")
    return picture


def llama_pro() -> Picture:
    """Draw copies behind groups of layers, and the zeroed projections of a copy."""
    picture = Picture(320)
    plan = plan_of("llama-pro")
    result = before_and_after(picture, plan, 60, "copy of {}")
    inside = plan.new_indices[-1]
    picture.title(310, "Inside a copy")
    frame = picture.frame(310, 42, 376, 252)
    picture.arrow(result[inside].right, (310, result[inside].right[1]), color=BLUE)
    x = 340
    for number, (reads, writes) in enumerate(
        (
            ("norm, $W_Q$, $W_K$, $W_V$,\nattention", "$W_O$"),
            ("norm, gate, up,\nactivation", "$W_{down}$"),
        )
    ):
        y = 76 + number * 106
        read = picture.box(x + 26, y, 150, 42, reads, "new")
        write = picture.box(x + 206, y, 80, 42, writes, "new", zero=True)
        picture.arrow((x, y - 14), (read.bottom[0], y - 14), read.bottom)
        picture.arrow(read.right, write.left)
        picture.arrow(write.top, (write.top[0], y + 60), (x + 8, y + 60))
        picture.plus(x, y + 60)
        picture.text(write.right[0] + 8, write.right[1], "adds 0", SMALL, RED, "left")
    picture.stream(x, frame.y + 8, frame.y + frame.height - 8)
    picture.legend("base", "new", "zero")
    return picture


def lesa() -> Picture:
    """Draw the shared basis of a matrix of all layers, and the network that predicts between two layers."""
    picture = Picture(320)
    plan = plan_of("lesa")
    result = before_and_after(picture, plan, 60, "from {} and {}")
    picture.title(310, "Each of the seven matrices")
    picture.frame(310, 42, 376, 252)
    picture.arrow(result[2].right, (310, result[2].right[1]), color=BLUE)
    picture.text(322, 276, "all layers side by side, one decomposition:", SMALL, FAINT, "left")
    for number in range(BASE_LAYERS):
        picture.box(322 + number * 33, 234, 31, 26, f"$W_{number}$")
    picture.text(498, 247, "$=\\ U\\ \\mathrm{diag}(S)$")
    coordinates = [picture.box(544 + number * 33, 234, 31, 26, f"$V_{number}$") for number in range(BASE_LAYERS)]
    label = "network, which learned\n$V_{l-1},\\ V_{l+1} \\rightarrow\\ V_l$ on the base"
    network = picture.box(506, 152, 170, 42, label, "new", size=SMALL)
    for source in plan.layers[2].sources:  # type: ignore[union-attr]
        picture.arrow(coordinates[source].bottom, (coordinates[source].bottom[0], 194))
    picture.text(568, 214, "row by row", SMALL, FAINT, "right")
    predicted = picture.box(574, 98, 34, 28, "$\\hat V$", "new")
    picture.arrow(network.bottom, predicted.top)
    matrix = picture.box(334, 92, 176, 40, "$\\hat W = U\\ \\mathrm{diag}(S)\\ \\hat V$\nof the new layer", "new")
    picture.arrow(predicted.left, matrix.right)
    picture.text(322, 64, "norms are those of layer 0;  nothing is zeroed", SMALL, FAINT, "left")
    picture.legend("base", "new")
    return picture


def deus() -> Picture:
    """Draw the fusion of both neighbours, with and without transport."""
    picture = Picture(320)
    assert plan_of("opt-deus") == plan_of("avg-deus"), "both methods make layers from the same neighbours"
    result = before_and_after(picture, plan_of("opt-deus"), 60, "from {} and {}")
    picture.title(310, "Each matrix of a fused layer")
    picture.frame(310, 122, 376, 172, "opt-deus")
    picture.arrow(result[4].right, (310, result[4].right[1]), color=BLUE)
    previous = picture.box(322, 234, 104, 30, "previous, $W_1$")
    picture.box(322, 184, 104, 30, "next, $W_2$")
    transport = picture.box(448, 234, 106, 30, "plan $T$ of rows", "new")
    mean = picture.box(564, 184, 112, 30, "$(T^\\top W_1 + W_2)\\ /\\ 2$", "new", size=SMALL)
    picture.arrow(previous.right, transport.left)
    picture.arrow((426, 205), (501, 205), transport.bottom)
    picture.arrow(transport.right, (mean.top[0], 249), mean.top)
    picture.arrow((426, 193), (564, 193))
    picture.text(676, 280, "optimal transport matches neurons", SMALL, FAINT, "right")
    picture.box(322, 134, 60, 28, "$W_O$", "new", zero=True)
    picture.box(390, 134, 60, 28, "$W_{down}$", "new", zero=True)
    picture.text(460, 148, "are not fused: the layer adds 0", SMALL, RED, "left")
    picture.frame(310, 42, 376, 66, "avg-deus")
    average = picture.box(322, 54, 128, 30, "$(W_1 + W_2)\\ /\\ 2$", "new", size=SMALL)
    picture.text(average.right[0] + 10, 69, "for every tensor; nothing is zeroed", SMALL, FAINT, "left")
    picture.legend("base", "new", "zero")
    return picture
