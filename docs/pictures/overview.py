"""Pictures of the whole: the way from a base to what is served, and the questions that choose a method."""

from docs.pictures.canvas import BLUE, FAINT, SMALL, Picture


def workflow() -> Picture:
    """Draw the commands between a base, the upscaled model, the trained one, and where it runs."""
    picture = Picture(250)
    base = picture.box(10, 105, 110, 50, "base")
    upscaled = picture.box(220, 105, 120, 50, "upscaled", "new")
    trained = picture.box(440, 105, 110, 50, "trained", "new")
    for first, second, command in ((base, upscaled, "upscale"), (upscaled, trained, "midus train\nmidus sft")):
        picture.arrow(first.right, second.left)
        picture.text((first.right[0] + second.left[0]) / 2, 152 if "\n" in command else 142, command, SMALL)
    for y, name in ((190, "Transformers"), (130, "vLLM"), (70, "llama.cpp")):
        engine = picture.box(600, y - 17, 96, 34, name, "none", size=SMALL)
        picture.arrow(trained.right, (575, trained.right[1]), (575, engine.left[1]), engine.left)
    picture.text(648, 38, "dense methods", SMALL, FAINT)
    picture.arrow(trained.bottom, (trained.bottom[0], 30), (base.bottom[0], 30), base.bottom, color=BLUE)
    picture.text(280, 44, "upscale strip: the base again", SMALL, BLUE)
    measure = picture.box(215, 195, 340, 34, "midus eval, midus look, midus compare", "none", size=SMALL)
    for model in (upscaled, trained):
        picture.arrow(model.top, (model.top[0], measure.y))
    picture.arrow((upscaled.x + 20, 105), (upscaled.x + 20, 80), (upscaled.x + 100, 80), (upscaled.x + 100, 105))
    picture.text(upscaled.bottom[0], 68, "midus edit: entries, blocks, chapters", SMALL)
    return picture


# Questions in the order in which they are asked, and what to take for a yes.
QUESTIONS = (
    ("Are the documents at hand with each question?", "the prompt, with retrieval"),
    ("Is it about named things, without training?", "packs"),
    ("Must a topic be deleted later, with proof?", "hier-ffn"),
    ("Must some texts provably stay as they are?", "engram with protect"),
    ("Must it run in llama.cpp?", "llama-pro"),
    ("Do you want the lowest loss on one text?", "LoRA"),
)


def choosing() -> Picture:
    """Draw the questions one below the other, with an answer to the right of each."""
    step, height, wide = 58, 38, 380
    picture = Picture(step * (len(QUESTIONS) + 1) + 6)
    y = picture.height - step + 8
    for question, answer in QUESTIONS:
        asked = picture.box(10, y, wide, height, question)
        taken = picture.box(480, y, 210, height, answer, "new")
        picture.arrow(asked.right, taken.left)
        picture.text((asked.right[0] + taken.left[0]) / 2, y + height / 2 + 10, "yes", SMALL)
        picture.arrow(asked.bottom, (asked.bottom[0], y - step + height))
        picture.text(asked.bottom[0] + 16, y - (step - height) / 2, "no", SMALL)
        y -= step
    picture.box(10, y, wide, height, "moda in Transformers, ultramem-v2 in vLLM", "new")
    return picture
