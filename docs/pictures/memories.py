"""Pictures of methods that add memory: where the memory reads, what it holds, and where its output is added."""

from matplotlib.patches import Circle

from docs.pictures.canvas import BLUE, FAINT, FILLS, RED, SMALL, Box, Picture
from docs.pictures.layers import BASE_LAYERS, plan_of, stack
from upscalers.plan import Base


def decoder_layer(
    picture: Picture, x: float, bottom: float, attention: tuple[str, str], ffn: tuple[str, str], width: float = 130
) -> tuple[Box, Box]:
    """Draw attention and feed-forward network beside the residual stream at x, and return their boxes.

    Args:
        picture: The picture to draw on.
        x: The residual stream.
        bottom: Lower end of the residual stream.
        attention: Text and kind of the attention.
        ffn: Text and kind of the feed-forward network.
        width: Width of both boxes. Default: 130.
    """
    boxes = []
    for number, (text, kind) in enumerate((attention, ffn)):
        y = bottom + 30 + number * 100
        box = picture.box(x + 26, y, width, 36, text, kind)
        picture.branch(x, y - 14, box, y + 52)
        boxes.append(box)
    picture.stream(x, bottom, bottom + 208)
    return boxes[0], boxes[1]


def midus() -> Picture:
    """Draw memory layers between layers, and the inside of one of midus-hml."""
    picture = Picture(440)
    plan = plan_of("midus-hml")
    picture.title(14, "Result")
    labels = [
        (f"layer {layer.index}", "base") if isinstance(layer, Base) else ("memory layer", "new")
        for layer in plan.layers
    ]
    layers = stack(picture, 14, 80, labels, 112, 52)
    block = layers[plan.new_indices[-1]]
    copied = plan.layers[plan.new_indices[-1]].sources[0]  # type: ignore[union-attr]
    picture.title(170, "Inside a block:  $M(x) = x + \\mathrm{HML}(\\mathrm{Attn}'(\\mathrm{LN}(x)))$")
    picture.frame(170, 36, 516, 380)
    picture.arrow(block.right, (170, block.right[1]), color=BLUE)
    x = 194
    attention = picture.box(232, 62, 300, 38, f"LN, Attn$'$: copied from layer {copied}, without $W_O$", "new")
    picture.arrow((x, 52), (attention.bottom[0], 52), attention.bottom)
    picture.text(x - 8, 46, "$x$", ha="right")
    picture.frame(218, 130, 328, 226, "per head $h$")
    query = picture.box(286, 144, 192, 26, "query $q_h$ = output of head $h$", "none")
    picture.arrow(attention.top, query.bottom)
    row = picture.box(232, 194, 142, 40, "$n$ row keys $K_h^{row}$\nscore half of $q_h$", "table", size=SMALL)
    column = picture.box(390, 194, 142, 40, "$n$ column keys $K_h^{col}$\nscore the other half", "table", size=SMALL)
    picture.arrow((320, 170), (303, 194))
    picture.arrow((444, 170), (461, 194))
    picture.box(232, 258, 300, 28, "$k$ best of $n \\times n$ pairs, softmax:  $\\alpha$", "new")
    picture.arrow(row.top, (303, 258))
    picture.arrow(column.top, (461, 258))
    values = picture.box(566, 250, 108, 44, "values $\\bar V$\n$n^2$ rows", "table", zero=True, size=SMALL)
    picture.text(620, 238, "shared by all heads", SMALL, FAINT)
    total = picture.box(322, 308, 210, 28, "$W_h\\ \\sum \\alpha\\ \\bar V_{slot}$", "new")
    picture.arrow((427, 286), (427, 308))
    picture.arrow(values.top, (620, 322), total.right)
    picture.arrow(total.top, (427, 380), (x + 8, 380))
    picture.text(436, 368, "heads side by side", SMALL, FAINT, "left")
    picture.plus(x, 380)
    picture.stream(x, 40, 412)
    picture.legend("base", "new", "table", "zero")
    return picture


def hierarchical() -> Picture:
    """Draw the path of a text through a tree of blocks, and where each method puts the blocks of the path."""
    picture = Picture(434)
    picture.title(14, "A bank on the disk: a tree of topics")
    amber, pale = FILLS["table"][1], "#c3c9d1"
    above = picture.box(124, 356, 52, 24, "root", "none", size=SMALL)
    for level, (lefts, chosen) in enumerate((((44, 124, 204), 1), ((44, 124, 204), 0)), start=1):
        nodes = [
            picture.box(
                left,
                356 - level * 62,
                52,
                26,
                f"$r_{level}$" if number == chosen else "",
                "table" if number == chosen else "none",
            )
            for number, left in enumerate(lefts)
        ]
        for number, node in enumerate(nodes):
            picture.arrow(above.bottom, node.top, tip=False, color=amber if number == chosen else pale)
        above = nodes[chosen]
    for x in (44, 70, 96):
        picture.arrow(above.bottom, (x, 206), tip=False, color=amber if x == 44 else pale)
    picture.text(276, 307, "$k$ nodes", SMALL, FAINT, "left")
    picture.text(276, 245, "$k^2$", SMALL, FAINT, "left")
    picture.text(14, 180, "Each node below the root has a block for all", SMALL, ha="left")
    picture.text(14, 163, "layers. A text fetches the blocks on its path:", SMALL, ha="left")
    for number, name in enumerate(("$r_1$", "$r_2$", "...", "$r_p$")):
        fetched = picture.box(14 + number * 52, 118, 46, 28, name, "table")
    picture.arrow(fetched.right, (322, 132), color=amber)
    picture.text(14, 96, "$r_1$ to $r_p$: sizes of the blocks", SMALL, FAINT, "left")
    picture.text(14, 66, "A block adds 0 at the start: $B$, $W_{down}$", SMALL, RED, "left")
    picture.text(14, 49, "or the values are zero.", SMALL, RED, "left")
    picture.title(322, "What hier- methods add to a layer")
    picture.frame(322, 36, 372, 368)
    x = 346
    for number, (matrix, method) in enumerate((("$W_Q$", "lora-qk"), ("$W_K$", "lora-qk"), ("$W_V$", "lora-vo"))):
        left = 372 + number * 108
        picture.box(left, 106, 100, 26, matrix)
        picture.box(left, 82, 100, 24, method, "new", size=SMALL)
        picture.arrow((x, 62), (left + 50, 62), (left + 50, 82))
    memory = picture.box(372, 160, 100, 36, "kv: $r$ keys\nand values", "new", size=SMALL)
    heads = picture.box(480, 160, 208, 36, "heads read the sequence")
    picture.arrow((422, 132), memory.bottom)
    picture.arrow((422, 146), (502, 146), (502, 160))
    picture.arrow((530, 132), (530, 160))
    picture.arrow((638, 132), (638, 160))
    picture.box(480, 224, 108, 26, "$W_O$")
    picture.box(588, 224, 100, 26, "lora-vo", "new", size=SMALL)
    picture.arrow(heads.top, (584, 224))
    picture.arrow(memory.top, (422, 208), (576, 208))
    picture.plus(584, 208)
    picture.arrow((584, 250), (584, 264), (x + 8, 264))
    picture.plus(x, 264)
    picture.arrow((x, 282), (422, 282), (422, 298))
    picture.arrow((422, 282), (638, 282), (638, 298))
    for left, matrix in ((372, "gate, up"), (480, "down")):
        picture.box(left, 322, 100, 26, matrix)
        picture.box(left, 298, 100, 24, "lora-ffn", "new", size=SMALL)
    units = picture.box(588, 298, 100, 50, "ffn: $r$ more\nhidden units", "new", size=SMALL)
    picture.arrow((472, 335), (480, 335))
    picture.arrow((530, 348), (530, 376), (x + 8, 376))
    picture.arrow(units.top, (638, 376), (538, 376))
    picture.plus(530, 376)
    picture.plus(x, 376)
    picture.stream(x, 44, 400)
    picture.legend("base", "new", "table")
    return picture


def moc() -> Picture:
    """Draw a layer that reads chapters, and the reading of a bank."""
    picture = Picture(440)
    picture.title(14, "Layer with memory")
    x = 32
    for number, (text, kind) in enumerate(
        (("norm, attention", "base"), ("memory read", "new"), ("norm, FFN", "base"))
    ):
        y = 84 + number * 112
        box = picture.box(58, y, 112, 34, text, kind)
        picture.branch(x, y - 16, box, y + 54)
        if kind == "new":
            read = box
    picture.stream(x, 44, 412)
    picture.title(216, "Memory read")
    picture.frame(216, 36, 470, 380)
    picture.arrow(read.right, (216, read.right[1]), color=BLUE)
    picture.box(386, 48, 130, 26, "$h$, residual stream", "base", size=SMALL)
    pool = picture.box(236, 102, 166, 42, "router $W_r$, $b_r$: the mean\nof $h$ in earlier chunks", "new", size=SMALL)
    picture.arrow((420, 74), (420, 88), (319, 88), pool.bottom)
    query = picture.box(546, 102, 126, 42, "$q = W_Q$ RMSNorm$(h)$", "new", size=SMALL)
    picture.arrow((482, 74), (482, 88), (609, 88), query.bottom)
    picture.arrow(pool.top, (319, 162))
    picture.text(236, 172, "opens the $k$ best chapters;  their weights are $g$", SMALL, FAINT, "left")
    picture.text(236, 192, "bank $M$:  $C$ chapters of memory tokens, S of them always read", SMALL, FAINT, "left")
    names = {0: "S", 3: "1", 6: "...", 8: "k"}
    for number in range(10):
        read = picture.box(
            236 + number * 29, 206, 26, 36, names.get(number, ""), "table" if number in names else "none", size=SMALL
        )
        if number in names:
            picture.arrow(read.top, (read.top[0], 274), color=FILLS["table"][1])
    picture.box(236, 274, 286, 30, "$K = g\\,M\\,W_K$         $V = g\\,M\\,W_V$", "new")
    attend = picture.box(356, 328, 190, 30, "softmax$(q K^\\top / \\sqrt{d_h})\\ V$", "new")
    picture.arrow((451, 304), attend.bottom)
    picture.arrow(query.top, (609, 343), attend.right)
    output = picture.box(404, 378, 94, 28, "$W_O$", "new", zero=True)
    picture.arrow(attend.top, output.bottom)
    picture.arrow(output.left, (216, 392), color=BLUE)
    picture.text(310, 402, "added to $h$", SMALL, BLUE)
    picture.legend("base", "new", "table", "zero")
    return picture


def beside_ffn(picture: Picture) -> Box:
    """Draw a decoder layer with a memory beside the feed-forward network; return the box of the memory."""
    x = 32
    attention = picture.box(58, 92, 96, 34, "norm, attention", "base", size=SMALL)
    picture.branch(x, 76, attention, 150)
    norm = picture.box(58, 196, 50, 26, "norm")
    picture.arrow((x, 182), (83, 182), norm.bottom)
    ffn = picture.box(50, 256, 66, 34, "FFN")
    memory = picture.box(126, 256, 70, 34, "memory", "new")
    picture.arrow(norm.top, ffn.bottom)
    picture.arrow((83, 238), (161, 238), memory.bottom)
    picture.arrow(ffn.top, (83, 330), (x + 8, 330))
    picture.arrow(memory.top, (161, 330), (91, 330), tip=False)
    picture.plus(83, 330)
    picture.plus(x, 330)
    picture.stream(x, 44, 396)
    return memory


def ultramem_v2() -> Picture:
    """Draw a memory beside the feed-forward network, and its retrieval."""
    picture = Picture(420)
    picture.title(14, "Every layer")
    memory = beside_ffn(picture)
    picture.title(230, "Memory")
    picture.frame(230, 36, 456, 360)
    picture.arrow(memory.right, (230, memory.right[1]), color=BLUE)
    picture.text(244, 52, "$x$: the input of the FFN", SMALL, FAINT, "left")
    query = picture.box(300, 72, 180, 28, "$r$ queries per side, RMSNorm", "new", size=SMALL)
    picture.arrow((390, 58), query.bottom)
    row = picture.box(240, 124, 146, 38, "$n$ keys $K_{row}$, RMSNorm:\nscores $S_{row}$", "table", size=SMALL)
    column = picture.box(394, 124, 146, 38, "$n$ keys $K_{col}$, RMSNorm:\nscores $S_{col}$", "table", size=SMALL)
    picture.arrow((330, 100), (313, 124))
    picture.arrow((450, 100), (467, 124))
    grid = picture.box(
        244,
        188,
        292,
        38,
        "$s_{ij} = S_{row}[i]^\\top\\, C\\, S_{col}[j]$,  core $C$: $r \\times r$\n$k$ best of $n \\times n$ rows",
        "new",
        size=SMALL,
    )
    picture.arrow(row.top, (313, 188))
    picture.arrow(column.top, (467, 188))
    pre = picture.box(566, 188, 108, 38, "$n^2$ pre-values $p$", "table", size=SMALL)
    picture.arrow((390, 64), (620, 64), pre.bottom)
    total = picture.box(244, 260, 292, 34, "$\\sum_i\\ s_i\\ (p_i^\\top W_p\\, x)\\ v_i$", "new")
    picture.arrow(grid.top, total.bottom)
    picture.arrow((620, 226), (620, 270), (536, 270))
    picture.box(566, 302, 108, 38, "$n^2$ values $v$", "table", zero=True, size=SMALL)
    picture.arrow((566, 321), (550, 321), (550, 284), (536, 284))
    output = picture.box(340, 322, 100, 28, "$W_o$", "new")
    picture.arrow(total.top, output.bottom)
    picture.arrow(output.top, (390, 372), (230, 372), color=BLUE)
    picture.text(400, 372, "added to the output of the FFN", SMALL, BLUE, "left")
    picture.legend("base", "new", "table", "zero")
    return picture


def engram() -> Picture:
    """Draw a memory beside the feed-forward network whose rows the last tokens choose."""
    picture = Picture(420)
    picture.title(14, "Two layers")
    memory = beside_ffn(picture)
    picture.title(230, "Memory")
    picture.frame(230, 36, 456, 360)
    picture.arrow(memory.right, (230, memory.right[1]), color=BLUE)
    picture.text(244, 52, "ids of the last two and three tokens", SMALL, FAINT, "left")
    pairs = picture.box(244, 76, 142, 38, "two tokens:\n8 hashes", "new", size=SMALL)
    triples = picture.box(394, 76, 142, 38, "three tokens:\n8 hashes", "new", size=SMALL)
    picture.box(244, 140, 292, 34, "16 rows side by side: $e$", "table", zero=True, size=SMALL)
    picture.arrow(pairs.top, (315, 140))
    picture.arrow(triples.top, (465, 140))
    gate = picture.box(394, 204, 142, 38, "gate: how well\n$W_k\\, e$ fits $h$", "new", size=SMALL)
    picture.arrow((465, 174), gate.bottom)
    picture.text(566, 216, "$h$: the input", SMALL, FAINT, "left")
    picture.text(566, 202, "of the FFN", SMALL, FAINT, "left")
    picture.arrow((562, 223), gate.right)
    value = picture.box(244, 264, 292, 32, "$v$ = gate $\\cdot\\ W_v\\, e$", "new")
    picture.arrow((315, 174), (315, 264))
    picture.arrow(gate.top, (465, 264))
    taps = picture.box(566, 292, 108, 34, "convolution over\nearlier $v$", "new", zero=True, size=SMALL)
    picture.arrow(value.right, (620, 280), taps.bottom)
    picture.plus(390, 340)
    picture.arrow(value.top, (390, 332))
    picture.arrow(taps.top, (620, 340), (398, 340))
    picture.arrow((382, 340), (230, 340), color=BLUE)
    picture.text(244, 372, "added to the output of the FFN", SMALL, BLUE, "left")
    picture.legend("base", "new", "table", "zero")
    return picture


def moda() -> Picture:
    """Draw slots that layers write, and how a head joins the sequence with the slots."""
    picture = Picture(400)
    picture.title(14, "Layers write and read slots")
    layers = stack(picture, 14, 92, [(f"layer {layer}", "base") for layer in range(BASE_LAYERS)], 84, 70)
    for writer, layer in enumerate(layers[:-1]):
        slot = picture.box(152, layer.y + 26, 96, 24, f"slot $k_{writer},\\ v_{writer}$", "new", size=SMALL)
        picture.arrow((98, layer.y + 19), (124, layer.y + 19), (124, slot.left[1]), slot.left)
        lane = 262.0 + 14 * writer
        picture.arrow(slot.right, (lane, slot.right[1]), (lane, layers[-1].y + 7), color=BLUE, tip=False)
        for reader in range(writer + 1, BASE_LAYERS):
            picture.axes.add_patch(Circle((lane, layers[reader].y + 7), 2.4, color=BLUE, zorder=3))
    for reader in range(1, BASE_LAYERS):
        y = layers[reader].y + 7
        picture.arrow((262 + 14 * (reader - 1), y), (98, y), color=BLUE)
    picture.text(14, 60, "$k$ and $v$ are projected from the input of", SMALL, FAINT, "left")
    picture.text(14, 44, "the FFN; heads read them at the same token.", SMALL, FAINT, "left")
    picture.title(322, "Inside a head of layer $l$")
    picture.frame(322, 36, 364, 340)
    picture.box(446, 52, 116, 28, "query $q$")
    sequence = picture.box(336, 110, 160, 42, "keys and values of\nthe sequence:  $o_S$", size=SMALL)
    depth = picture.box(
        512, 110, 160, 42, "slots of layers 0 ... $l-1$:\n$o_D$,  with $v$ zero", "new", zero=True, size=SMALL
    )
    picture.arrow((470, 80), (416, 110))
    picture.arrow((538, 80), (592, 110))
    picture.box(
        356,
        190,
        296,
        42,
        "$w = D\\ /\\ (S + D)$:  the share of the slots\nin one softmax over both",
        "new",
        size=SMALL,
    )
    picture.arrow(sequence.top, (416, 190))
    picture.arrow(depth.top, (592, 190))
    gate = picture.box(356, 258, 130, 26, "gate $c$ per head", "new", zero=True, size=SMALL)
    joined = picture.box(356, 308, 296, 32, "$(1 - c\\,w)\\ o_S\\ +\\ (1 - c + c\\,w)\\ o_D$", "new")
    picture.arrow((568, 232), (568, 308))
    picture.arrow(gate.top, (421, 308))
    picture.arrow(joined.top, (504, 358))
    picture.text(514, 355, "output of the head, to $W_O$", SMALL, FAINT, "left")
    picture.legend("base", "new", "zero")
    return picture


def packs() -> Picture:
    """Draw a text whose tokens attend to the pack of a name from the name on."""
    picture = Picture(250)
    picture.title(14, "Texts beside the weights")
    picture.box(14, 60, 190, 46, "pack: keys and values that\nthe model makes of a text", "table", size=SMALL)
    picture.box(14, 150, 190, 46, "names and texts,\nin glossary.jsonl", "table", size=SMALL)
    picture.arrow((109, 150), (109, 106))
    picture.title(270, "Attention in every layer")
    words = ("the", "port", "of", "Kestrel", "is", "...")
    for number, word in enumerate(words):
        left = 270 + 68 * number
        is_open = number >= 3
        picture.box(left, 150, 60, 28, word, "new" if is_open else "base", size=SMALL)
        if is_open:
            picture.arrow((left + 30, 150), (left + 30, 83), (204, 83), color=BLUE)
    picture.text(270, 196, "read what the base reads, bit for bit", SMALL, FAINT, "left")
    picture.text(474, 132, "read the pack too, in one softmax", SMALL, BLUE, "left")
    return picture


def glossary() -> Picture:
    """Draw what a question is answered by the base, with a glossary, and once the entry is deleted, beside one without a name."""
    picture = Picture(236)
    asked = ("Which port does the\nKestrel gateway listen on?", "What is the capital\nof France?")
    picture.box(
        14,
        92,
        186,
        62,
        "Kestrel gateway: The Kestrel\ngateway listens on port 8443. It\nforwards requests to ...",
        "table",
        size=SMALL,
    )
    picture.title(14, "glossary.jsonl")
    for number, question in enumerate(asked):
        picture.text(430 + 180 * number, 204, question, SMALL)
    rows = (
        ("the base", "port 2383", "base"),
        ("with the glossary", "port 8443", "new"),
        ("the entry deleted", "port 2383", "base"),
    )
    for number, (model, answer, kind) in enumerate(rows):
        y = 138 - 46 * number
        picture.text(332, y + 15, model, SMALL, ha="right")
        picture.box(350, y, 160, 30, answer, kind)
        picture.box(530, y, 160, 30, "Paris", "base")
    picture.arrow((200, 123), (222, 123), (222, 107), (232, 107), color=BLUE)
    picture.text(610, 24, "the same logits, bit for bit", SMALL, FAINT)
    picture.text(430, 24, "first and last are equal, bit for bit", SMALL, FAINT)
    return picture
