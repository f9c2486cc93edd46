"""remoe chat: turns through a pipe and from a terminal, what is kept between them, and what ends what."""

import io
import json
import re
import shutil
import signal
import sys

import pytest
from commands import make_model, refused
from tiny_tokenizers import wrapped

from remoe_cli.chat import _CtrlC
from remoe_cli.talk.screen import Screen
from remoe_cli.talk.turns import Template, Turn

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


@pytest.fixture
def chat(remoe, monkeypatch):
    """chat(model, lines, options...): what the command did with these lines on stdin."""

    def run(model, lines, *options):
        content = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return remoe("chat", *([] if model is None else [model]), *options)

    return run


@pytest.fixture
def talker(tmp_path):
    """A model whose tokenizer has a chat template."""
    folder = make_model(tmp_path / "talker", max_position_embeddings=600)
    wrapped(template=TEMPLATE, bos=False).save_pretrained(folder)
    return folder


def answers(ran) -> list[str]:
    assert ran.code == 0, ran.err
    return ran.out.split("\n")[:-1]


def continued(remoe, model, prompt: str, tokens: int, *options) -> str:
    ran = remoe("decode", model, "--prompt", prompt, "--cache", 3, "--tokens", tokens, *options, "--json")
    (text,) = json.loads(ran.out)["rows"][0]["texts"]
    return text


RAW = ("--template", "raw", "--cache", 3, "--tokens", 9)


def test_answers_are_what_decode_says_behind_the_turns_so_far(remoe, model, chat):
    first = continued(remoe, model, "User: hello world\nAssistant:", 9)
    second = continued(remoe, model, f"User: hello world\nAssistant:{first}\nUser: is it\nAssistant:", 9)
    ran = chat(model, ["hello world", "is it"], *RAW)
    assert ran.code == 0 and ran.out == f"{first}\n{second}\n"
    told = [line for line in ran.err.splitlines() if " tokens (length), " in line]
    assert len(told) == 2
    assert ran.err.splitlines()[-2].startswith("2 answers, 18 tokens, ")


def test_what_was_read_and_loaded_serves_the_next_turn(model, chat):
    ran = chat(model, ["hello world", "/stats", "is it", "/stats"], *RAW[:2], "--cache", 8, "--tokens", 9)
    one, two = re.findall(r"^(\d+) of (\d+) prompt tokens were read, .*; (\d+) of", ran.err, re.M)[:2]
    read, whole, held = map(int, one)
    assert read == whole and held == whole + 8
    assert int(two[0]) < int(two[1]) - whole, "the second turn reads less than all that was said before"
    hits = [float(hit) for hit in re.findall(r"tokens \(length\), .*? hit ([.0-9]+)", ran.err)]
    assert hits[1] > hits[0]


def test_the_tokenizers_template_and_its_end_token(remoe, talker, chat):
    said = continued(remoe, talker, "<s>system: be brief</s><s>user: hello</s><s>assistant: ", 9)
    ran = chat(talker, ["hello"], "--cache", 3, "--tokens", 9, "--system", "be brief")
    assert ran.out == said + "\n"


def test_orders(model, chat):
    ran = chat(model, ["/stats", "hello", "", "/reset", "hello", "/nonsense", "/help", "/quit", "hello"], *RAW)
    one, two = answers(ran)
    assert one == two
    told = ran.err
    assert "Nothing was said yet." in told and "The turns are forgotten" in told
    assert "There is no /nonsense: /quit" in told and told.count("Ctrl-C ends an answer") == 2
    assert "2 answers, 18 tokens" in told and "3 answers" not in told
    assert len(answers(chat(model, ["/etc/passwd is a file"], *RAW))) == 1, "a turn that begins like an order"


def test_draws_differ_from_turn_to_turn_and_come_again(model, chat):
    drawn = (*RAW, "--temperature", 2, "--seed", 5)
    one, two = (chat(model, ["hello", "/reset", "hello", "hello"], *drawn).out for _ in range(2))
    assert one == two
    first, again, other = one.split("\n")[:3]
    assert first == again != other


def test_a_stop_text_ends_a_raw_answer(remoe, model, chat, monkeypatch):
    long = continued(remoe, model, "User: hello\nAssistant:", 9)
    stop = long[4:6]
    before = long[: long.index(stop)]
    real = Template.__init__

    def stopping(self, *words):
        real(self, *words)
        self.stops = (stop,)

    monkeypatch.setattr(Template, "__init__", stopping)
    ran = chat(model, ["hello"], *RAW)
    assert ran.out == (before + "\n" if before else "") and "(stop text)" in ran.err


def test_the_oldest_turns_are_forgotten_when_all_take_too_much(model, chat):
    lines = [f"{word} the lazy dog" for word in ("hello", "quick", "brown", "fox")]
    ran = chat(model, lines, *RAW, "--context", 60)
    assert len(answers(ran)) == 4 and "oldest turns are forgotten: all together take more than --context 60" in ran.err
    assert max(int(n) for n in re.findall(r"; (\d+) of 60 are held", ran.err)) <= 60 + 9
    ran = chat(model, ["hello", "the lazy dog " * 30, "hello"], *RAW, "--context", 60)
    assert len(answers(ran)) == 2 and re.search(r"That takes \d+ tokens, more than --context 60: say less.", ran.err)


def test_the_latest_run_without_a_model(made, remoe, chat):
    import os

    os.makedirs("runs")
    shutil.copytree(made / "run", "runs/mine")
    assert chat(None, ["hello"], *RAW).out == chat(made / "model", ["hello"], *RAW, "--delta", made / "run").out
    shutil.rmtree("runs")
    refused(chat(None, ["hello"], *RAW), "no run with a delta")


def test_what_cannot_be_talked_with(model, talker, chat):
    refused(chat(model, ["hello"]), "has no chat template", f"Try: remoe chat {model} --template raw")
    refused(chat(model, ["hello"], "--template", "chatml"), "--template is auto or raw", f"Try: remoe chat {model}")
    refused(chat(model, ["hello"], *RAW, "--context", 0), "--context is at least 1")
    refused(chat(model, ["hello"], *RAW, "--cache", "2,3"), "--cache is one value here")
    refused(chat(talker, ["hello"], "--tokens", 600), "more than the 600", f"Try: remoe chat {talker} --tokens 32")
    refused(chat(talker, ["hello"], "--context", 600), "more than the 600", "--context 599")
    assert chat(talker, ["hello"], "--context", 590, "--cache", 3).err.count(" tokens (length)") == 1
    bad = chat(model, b"hello\ncaf\xe9\n", *RAW)
    assert bad.code == 1 and "error: line 2 on stdin is not UTF-8 text." in bad.err and len(bad.out.splitlines()) == 1


def test_a_template_may_refuse(talker, chat):
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    wrapped(template=strict, bos=False).save_pretrained(talker)
    ran = chat(talker, ["hello"], "--system", "be brief", "--cache", 3)
    refused(ran, "the chat template refuses the turns: no system here", f"Try: remoe chat {talker} --cache 3")
    wrapped(template="{{ raise_exception('never') }}", bos=False).save_pretrained(talker)
    refused(chat(talker, ["hello"], "--cache", 3), "refuses the turns: never", "--template raw")


def test_raw_turns_are_lines_with_roles():
    tokenizer = wrapped()
    turns = [Turn("system", "be brief"), Turn("user", "hello"), Turn("assistant", " yes"), Turn("user", "is it?")]
    template = Template(tokenizer, "raw", "m", lambda **_: "")
    text = "System: be brief\nUser: hello\nAssistant: yes\nUser: is it?\nAssistant:"
    assert template.ids(turns) == tokenizer(text).input_ids and "\nUser:" in template.stops


def pressed_at(monkeypatch, method: str, calls: tuple[int, ...]) -> None:
    """Ctrl-C whenever the screen is called for the n-th time."""
    real, count = getattr(Screen, method), [0]

    def pressing(self, text):
        real(self, text)
        count[0] += 1
        if count[0] in calls:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Screen, method, pressing)


def test_ctrl_c_ends_the_answer_and_not_the_conversation(model, chat, monkeypatch):
    whole = chat(model, ["hello", "hello"], *RAW).out.split("\n")
    pressed_at(monkeypatch, "tell", (4,))  # reading, then a call a token: after the third token
    ran = chat(model, ["hello", "hello"], *RAW)
    one, _two = answers(ran)
    assert "3 tokens (Ctrl-C)" in ran.err and "9 tokens (length)" in ran.err
    assert whole[0].startswith(one) and one != whole[0]


def test_ctrl_c_before_the_first_word_forgets_the_turn(model, chat, monkeypatch):
    (alone,) = answers(chat(model, ["is it"], *RAW))
    pressed_at(monkeypatch, "tell", (1,))
    ran = chat(model, ["hello", "is it"], *RAW)
    assert "Ended before the first word; that turn is forgotten." in ran.err and answers(ran) == [alone]


def test_a_second_ctrl_c_ends_the_conversation():
    ctrl_c = _CtrlC()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.press()  # at the prompt, or before a first token
    ctrl_c.begin()
    assert not ctrl_c.ends_answer()
    ctrl_c.press()
    assert ctrl_c.ends_answer() and ctrl_c.pressed == 1
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.press()
