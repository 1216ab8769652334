"""`midus ask`: the answer of a model to one question, with the blocks that the question fetches."""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch
from look.upscaled_folders import loaded
from models.pack_models import chat_tokenizer, tiny_tokenizer
from sft.tiny_chats import write_rows
from tokenizers import processors
from topics.trees import random_tree
from transformers import AutoModelForCausalLM, GenerationConfig

from midus_hf.cli.command_line import Termination
from midus_hf.evaluation.asking import Conversation
from midus_hf.models import saved_models
from tests.tiny import save_tiny_model
from tests.training.tiny_run import document, letter_tokenizer, save_upscaled
from upscalers import upscale
from upscalers.edits.banks import delete
from upscalers.edits.checkpoint_edit import EditRequest

QUESTION = document(2, seed=0)
AS_TEXT = "the model has no chat template: the question is continued as text\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_upscaled("llama", tmp_path_factory.mktemp("model"), tokenizer=letter_tokenizer())


@pytest.fixture
def ask(as_command):
    return lambda *words: as_command("midus ask")(*words, "--max-new-tokens", 5)


def answer_of(folder, text, tokenizer=None, **options):
    tokenizer = tokenizer or letter_tokenizer()
    ids = tokenizer(text, return_tensors="pt")
    written = loaded(folder).generate(**ids, max_new_tokens=5, do_sample=False, **options)
    return tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def with_packs(folder, tokenizer, rows, **options):
    save_tiny_model("llama", folder / "base")
    tokenizer.save_pretrained(folder / "base")
    options |= {"corpus": str(write_rows(folder / "rows.jsonl", rows))}
    upscale(base=folder / "base", method="packs", output=folder / "model", options=options, verify=False)
    return folder / "model"


def test_chat_template_frames_the_question_unless_plain(model, ask, tmp_path):
    """No end token follows it."""
    tokenizer, folder = letter_tokenizer(), shutil.copytree(model, tmp_path / "model")
    behind = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = behind
    tokenizer.save_pretrained(folder)
    assert ask(folder, QUESTION) == (0, answer_of(model, QUESTION) + "\n", AS_TEXT)
    tokenizer.chat_template = "w1 {{ messages[0]['content'] }} w2"
    tokenizer.save_pretrained(folder)
    assert ask(folder, QUESTION) == (0, answer_of(model, f"w1 {QUESTION} w2") + "\n", "")
    assert ask(folder, QUESTION, "--plain") == (0, answer_of(model, QUESTION) + "\n", "")


def test_answer_is_greedy_whatever_the_models_settings(model, ask, tmp_path):
    folder, expected = shutil.copytree(model, tmp_path / "model"), (0, answer_of(model, QUESTION) + "\n", AS_TEXT)
    for settings in ({"repetition_penalty": 0.01}, {"num_beams": 2}):
        GenerationConfig(**settings).save_pretrained(folder)
        assert ask(folder, QUESTION) == expected, settings


def test_questions_of_a_file_are_asked_in_order_with_one_load(model, ask, tmp_path, monkeypatch):
    other, loads = f"{document(2, seed=1)}\u2028{document(2, seed=2)}", []
    (tmp_path / "questions.txt").write_text(f"{QUESTION}\n\n  {other}\n", encoding="utf-8-sig")
    out = "".join(f"> {each}\n{answer_of(model, each)}\n" for each in (QUESTION, other))
    load = saved_models.load_for_reading
    monkeypatch.setattr(saved_models, "load_for_reading", lambda *words: loads.append(words) or load(*words))
    assert ask(model, "--questions", tmp_path / "questions.txt") == (0, out, AS_TEXT)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\ufeff{QUESTION}\n{other}"))
    assert ask(model, "--questions", "-") == (0, out, AS_TEXT)
    assert len(loads) == 2


def test_wrong_questions_are_refused_before_loading(model, ask, tmp_path):
    for name, content in (("empty.txt", b"\n"), ("other.txt", b"caf\xe9?")):
        (tmp_path / name).write_bytes(content)
    for words, message in (
        ([QUESTION, "--questions", "-"], "QUESTION and --questions are given; expected one of them. Leave one out."),
        (["--plain"], "--plain is given without QUESTION, and a conversation needs the chat template; leave it out."),
        (["--questions", tmp_path / "empty.txt"], "which has no question; expected one per line."),
        (["--questions", tmp_path / "other.txt"], "Expected a text file in UTF-8, a question per line."),
        (["--questions", tmp_path / "rows.JSONL"], "midus look glossary --questions asks rows."),
        (["--questions", tmp_path / "none.txt"], "which cannot be read: [Errno 2] No such file"),
    ):
        status, out, err = ask(model, *words)
        assert (status, out) == (2, ""), message
        assert message in err


@pytest.fixture(scope="module")
def banked(tmp_path_factory):
    """Return a model with a bank; some blocks were written, and some of these deleted."""
    folder = tmp_path_factory.mktemp("banked")
    upscaled = save_upscaled("llama", folder, "hier-ffn", tokenizer=letter_tokenizer())
    bank = AutoModelForCausalLM.from_pretrained(upscaled).banks.bank("hier-ffn")
    for level, node in ((1, 1), (2, 4), (1, -1), (2, -1), (1, 0), (2, 0), (2, 5)):
        bank.write(level, node, torch.full((bank.layout.record_numel(level),), 0.1))
    delete(EditRequest(upscaled, folder / "deleted"), ["1:0", "2:0", "2:5"])
    random_tree(3, 2).save(folder / "deleted" / "memory_bank" / "hier-ffn")
    return folder / "deleted"


def test_unreadable_question_is_refused_in_one_line(ask, tmp_path):
    """By a tokenizer with more ids than the model embeds, a template that takes no single question, or for want of tokens."""
    model, tokenizer = save_upscaled("llama", tmp_path, tokenizer=letter_tokenizer()), letter_tokenizer()
    tokenizer.add_tokens([f"<extra{number}>" for number in range(140)])
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    tokenizer.save_pretrained(model)
    for words, messages in (
        ([f"{QUESTION} <extra139>", "--plain"], ("the tokenizer yields id ", "but the model embeds 128 ids")),
        ([QUESTION], ("whose chat template refuses a single question; pass --plain to skip it: system first",)),
        ([QUESTION, "--dtype", "int8"], ("dtype is 'int8'",)),
        (["her\udc80on"], ("'her\\udc80on', with an unpaired surrogate; expected text in UTF-8. Write it again.",)),
    ):
        status, out, err = ask(model, *words)
        assert (status, out, err.count("\n")) == (2, "", 1), messages
        assert err.startswith("midus ask: "), messages
        assert all(message in err for message in messages)


@pytest.mark.parametrize(("path", "line"), [
    ([1, 4], "blocks 1:1, 2:4 are read\n"),
    ([-1, -1], "no topic is close: the generic memory is read\n"),
    ([1, 5], "blocks 1:1 are read; deleted: 2:5\n"),
    ([1, 3], "blocks 1:1 are read; never trained: 2:3\n"),
    ([0, 1], "no block is read; deleted: 1:0; never trained: 2:1\n"),
])  # fmt: skip
def test_question_fetches_the_blocks_of_its_topic(path, line, banked, ask, monkeypatch):
    retriever = SimpleNamespace(tree=None, paths=lambda texts: torch.tensor([path]))
    monkeypatch.setattr("midus_hf.topics.memory_retriever.MemoryRetriever.load", lambda folder, device: retriever)
    monkeypatch.setattr("midus_hf.evaluation.fetching.check_tree_of", lambda model, tree: None)
    expected = answer_of(banked, QUESTION, memory_ids=torch.tensor([path]))
    assert ask(banked, QUESTION) == (0, expected + "\n", AS_TEXT + line)


def test_bank_without_a_tree_is_noted_as_not_read(banked, ask, tmp_path):
    folder = shutil.copytree(banked, tmp_path / "model")
    (folder / "memory_bank" / "hier-ffn" / "tree.json").unlink()
    line = f"no block is read: {folder} has no tree of topics in its bank; midus train saves the one of --tree\n"
    assert ask(folder, QUESTION) == (0, answer_of(folder, QUESTION) + "\n", AS_TEXT + line)


def test_names_of_packs_precede_the_question_and_are_listed(ask, tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"name": ["Iron ore", "Fe"], "text": "(26)"}, {"name": "tungsten", "text": "Wolf."}]
    rows.append({"name": "Steel", "text": "Of iron ore."})
    model = with_packs(tmp_path, tokenizer, rows, open=2, score_bias=1.0)

    def answer(*lines):
        return answer_of(model, "\n".join(lines), tokenizer)

    differ: list[bool] = []
    for question, in_front, said in (
        ("Is it Fe?", ["Iron ore"], "entries read: Iron ore"),
        ("Iron  ore, tungsten", ["Iron ore", "tungsten"], "entries read: Iron ore, tungsten"),
        ("Is it steel?", ["Steel"], "entries read: Steel, Iron ore"),
        ("STEEL: Steel, tungsten, Fe?", ["Steel", "tungsten", "Iron ore"], "entries read: tungsten, Iron ore"),
    ):
        line = f"{said}; names put before the question: {', '.join(in_front)}"
        line += "; named, but not read: Steel\n" if len(in_front) == 3 else "\n"
        assert ask(model, question) == (0, answer(*in_front, question) + "\n", AS_TEXT + line)
        differ.append(answer(*in_front, question) != answer(question))
    assert any(differ)
    line = "no entry is read: the question contains no name of an entry"
    for question, near in (("Is it so?", "\n"), ("Is it tungstem?", "; did you mean 'tungsten'?\n")):
        assert ask(model, question) == (0, answer(question) + "\n", AS_TEXT + line + near)


@pytest.fixture(scope="module")
def of_chats(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("chats"), tiny_tokenizer()
    tokenizer.chat_template = f"Ironing.\n{chat_tokenizer().chat_template}"
    rows = [{"name": name, "text": "(26)"} for name in ("Iron", "Steel", "Tin")]
    return tokenizer, with_packs(folder, tokenizer, rows)


def test_conversation_reads_turns_until_input_ends(of_chats, ask, model, monkeypatch):
    tokenizer, folder = of_chats
    monkeypatch.setattr("sys.stdin", io.StringIO("Is it iron?\n\n  And why?\n"))
    first = answer_of(folder, "Ironing.\n(Q) Iron\nIs it iron?\n(A)", tokenizer)
    second = answer_of(folder, f"Ironing.\n(Q) Iron\nIs it iron?\n(A) {first}\n(Q) And why?\n(A)", tokenizer)
    told = "entries read: Iron; names put before the question: Iron\nentries read: Iron\n"
    take_cache, are_taken = Conversation._take_cache, []

    def noted(*words):
        cache = take_cache(*words)
        are_taken.append(cache is not None)
        return cache

    monkeypatch.setattr(Conversation, "_take_cache", noted)
    assert ask(folder) == (0, f"> Is it iron?\n{first}\n> And why?\n{second}\n", told)
    assert are_taken == [False, True], "the second turn goes on from the first"
    for text, message in (("her\udc80on\n", "with an unpaired surrogate"), ("", "")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status, out, err = ask(folder)
        assert (status, out) == (2 if message else 0, "")
        assert message in err
    status, out, err = ask(model)
    assert (status, out) == (2, "")
    assert "which has no chat template for a conversation; expected QUESTION." in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stdin", "stop", "status"),
    [(Terminal, KeyboardInterrupt, 0), (Terminal, Termination, 130), (io.StringIO, KeyboardInterrupt, 130)],
)
def test_ctrl_c_at_a_terminal_stops_only_the_answer(stdin, stop, status, of_chats, ask, monkeypatch):
    tokenizer, folder = of_chats
    monkeypatch.setattr("sys.stdin", stdin("Is it iron?\nIs it steel?\n"))
    answer, answered = Conversation.answer, []

    def interrupted_once(*arguments, **options):
        answered.append(arguments)
        if len(answered) == 1:
            raise stop
        return answer(*arguments, **options)

    monkeypatch.setattr(Conversation, "answer", interrupted_once)
    ended, out, err = ask(folder)
    assert ended == status
    second = answer_of(folder, "Ironing.\n(Q) Steel\nIs it steel?\n(A)", tokenizer)
    assert (second in out) == (status == 0)
    assert ("stopped: question and answer are not part of the conversation" in err) == (status == 0)


def test_name_of_one_entry_stands_before_a_question_in_a_chat(of_chats, ask):
    tokenizer, model = of_chats
    for question, in_front, said in (
        ("Is it iron?", "Iron\n", "entries read: Iron; names put before the question: Iron\n"),
        ("Is it iron\nor steel?", "", "entries read: Iron, Steel\n"),
    ):
        asked = f"Ironing.\n(Q) {in_front}{question}\n(A)"
        assert ask(model, question) == (0, answer_of(model, asked, tokenizer) + "\n", said)
    unnamed = "no entry is read: the question contains no name of an entry"
    assert ask(model, "Is it so?")[2] == unnamed + "\n", "what the template says is not asked"
    assert ask(model, "Is it steell?")[2] == unnamed + "; did you mean 'Steel'?\n"
    three = ask(model, "Tin, iron, steel?")[2]
    assert three == "entries read: Iron, Steel; named, but not read: Tin\n"


def test_text_with_closed_packs_is_not_said_to_lack_names(ask, tmp_path):
    model = with_packs(tmp_path, tiny_tokenizer(), [{"name": "Iron", "text": "(26)"}])
    assert ask(model, "Is it iron?\nSay so.\n")[2] == AS_TEXT + "no entry is read; named, but not read: Iron\n"
