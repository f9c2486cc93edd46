"""Defaults of options: command line > REMOE_* > settings file > the command's own; what cannot be used is refused in one line."""

import json
from pathlib import Path

import pytest
from commands import refused
from typer.main import get_command

from remoe_cli import config
from remoe_cli.cli import app
from remoe_cli.cli.root import _options
from remoe_cli.errors import UsageError

COMMANDS: dict = {
    (): {"quiet": "flag"},
    ("eval",): {"cache": "value", "seeds": "value", "measure": "flag", "domain": "list"},
    ("trace",): {},
    ("trace", "import"): {"format": "value"},
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """settings(text) makes that the settings file of this test."""
    monkeypatch.delenv("REMOE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))

    def write(text: str) -> Path:
        path = tmp_path / "xdg/remoe/config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def read(tmp_path, text: str = "", **environment: str) -> dict:
    (tmp_path / "c.toml").write_text(text)
    found = config.defaults(COMMANDS, {"REMOE_CONFIG": str(tmp_path / "c.toml"), **environment})
    return {(*one.words, one.option): (one.value, one.source.replace(str(tmp_path), "")) for one in found}


def test_where_the_file_lies():
    assert config.place({"REMOE_CONFIG": "a.toml", "XDG_CONFIG_HOME": "/x"}) == Path("a.toml")
    assert config.place({"XDG_CONFIG_HOME": "/x"}) == Path("/x/remoe/config.toml")
    assert config.place({}) == Path.home() / ".config/remoe/config.toml"
    assert config.defaults(COMMANDS, {"XDG_CONFIG_HOME": "/no/such/folder"}) == []


def test_each_value_is_as_the_command_line_takes_it(tmp_path):
    text = 'quiet = true\n[eval]\ncache = "6,12"\nseeds = 3\nmeasure = false\ndomain = ["demo:code", 7]\n[trace.import]\nformat = "x"'
    assert read(tmp_path, text) == {
        ("quiet",): (True, "quiet in /c.toml"),
        ("eval", "cache"): ("6,12", "[eval] cache in /c.toml"),
        ("eval", "seeds"): ("3", "[eval] seeds in /c.toml"),
        ("eval", "measure"): (False, "[eval] measure in /c.toml"),
        ("eval", "domain"): (["demo:code", "7"], "[eval] domain in /c.toml"),
        ("trace", "import", "format"): ("x", "[trace.import] format in /c.toml"),
    }
    assert read(tmp_path, "[eval]\ncache = 6", REMOE_EVAL_CACHE="9", REMOE_EVAL_DOMAIN="a 'b c'") == {
        ("eval", "cache"): ("9", "REMOE_EVAL_CACHE"),
        ("eval", "domain"): (["a", "b c"], "REMOE_EVAL_DOMAIN"),
    }
    assert read(tmp_path, "[eval]\ncache = 6", REMOE_EVAL_CACHE="")[("eval", "cache")][0] == "6", (
        "an empty one is unset"
    )
    for word, value in (("1", True), ("TRUE", True), ("on", True), ("no", False), ("0", False)):
        assert read(tmp_path, REMOE_EVAL_MEASURE=word)[("eval", "measure")][0] is value
    assert read(tmp_path, REMOE_TRACE_IMPORT_FORMAT="x", REMOE_SHARED="/s", REMOE_EVALUATE="1").keys() == {
        ("trace", "import", "format")
    }


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("[eval", {}, "not TOML"),
        ("[evl]\ncache = 6", {}, "evl is no option of remoe or command; did you mean eval?"),
        ("[eval]\ncahce = 6", {}, "[eval] cahce is no option of remoe eval; did you mean cache?"),
        ("[trace.imprt]\nformat = 1", {}, "[trace] imprt is no option of remoe trace or command; did you mean import?"),
        ("eval = 3", {}, "eval is no option of remoe or command"),
        ("[eval]\nnothing-like-it = 6", {}, "nothing-like-it is no option of remoe eval. Try: remoe eval --help"),
        ("[eval]\nmeasure = 'no'", {}, "[eval] measure is true or false, not 'no'"),
        ("[eval]\ndomain = 'a'", {}, "[eval] domain is a list"),
        ("[eval]\ncache = [6, 12]", {}, "[eval] cache is a text or a number, such as \"6,12\", not [6, 12]"),
        ("[eval]\ncache = true", {}, "[eval] cache is a text or a number"),
        ("", {"REMOE_EVAL_MEASURE": "maybe"}, "REMOE_EVAL_MEASURE is true or false, not 'maybe'"),
        ("", {"REMOE_EVAL_DOMAIN": "'a"}, "REMOE_EVAL_DOMAIN cannot be split into words"),
        ("", {"REMOE_EVAL_CAHCE": "6"}, "REMOE_EVAL_CAHCE belongs to no option; did you mean REMOE_EVAL_CACHE?"),
    ],
)  # fmt: skip
def test_what_cannot_be_used(tmp_path, text, environment, words):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text, **environment)
    assert words in str(caught.value) and "Try: " in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"REMOE_CONFIG names .*, and there is no such file"):
        config.defaults(COMMANDS, {"REMOE_CONFIG": str(tmp_path / "absent.toml")})
    with pytest.raises(UsageError, match="cannot be read"):
        config.defaults(COMMANDS, {"REMOE_CONFIG": str(tmp_path)})
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(UsageError, match="not TOML"):
        config.defaults(COMMANDS, {"REMOE_CONFIG": str(tmp_path / "latin.toml")})


def test_the_command_line_wins_then_the_environment_then_the_file(remoe, settings, monkeypatch):
    settings("[recipes]\njson = true\n")
    assert json.loads(remoe("recipes", "demo").out)
    monkeypatch.setenv("REMOE_RECIPES_JSON", "0")
    assert "Every key" in remoe("recipes", "demo").out
    assert json.loads(remoe("recipes", "demo", "--json").out)


def test_a_required_option_may_come_from_there(remoe, settings, monkeypatch, model):
    assert remoe("decode", model).code == 2
    settings("[decode]\ncache = 4\ntokens = 3\nprompt = 'the quick'\n")
    monkeypatch.setenv("REMOE_DECODE_TOKENS", "2")
    ran = remoe("decode", model, "--json", "-v")
    assert ran.code == 0, ran.err
    row = json.loads(ran.out)["rows"][0]
    assert row["capacity"] == 4 and row["new_tokens"] == 2
    assert "decode --cache: 4 if it is not given ([decode] cache in " in ran.err
    assert "decode --tokens: 2 if it is not given (REMOE_DECODE_TOKENS)" in ran.err


def test_settings_that_cannot_be_used_stop_a_command_but_not_help(remoe, settings, monkeypatch):
    path = settings("[eval]\nseeds = 'many'\n")
    refused(remoe("recipes", "demo"), f"[eval] seeds in {path}", "integer", "remoe eval --help")
    for words in (["--help"], ["--version"]):
        assert remoe(*words).code == 0
    settings("[eval]\nchace = 6\n")
    refused(remoe("recipes", "demo"), "did you mean cache?")
    settings("")
    monkeypatch.setenv("REMOE_EVAL_SEEDS", "x")
    refused(remoe("recipes", "demo"), "REMOE_EVAL_SEEDS", "integer")


def test_every_option_of_every_command_has_a_name_of_its_own():
    """No two options share a variable, and none is one that remoe reads otherwise."""
    names = [config.variable(words, key) for words, options in _options(get_command(app)).items() for key in options]
    assert len(names) == len(set(names)) > 100
    assert not {"REMOE_CONFIG", "REMOE_SHARED", "REMOE_FAULTS", "REMOE_VLLM", "REMOE_VERSION", "REMOE_HELP"} & set(
        names
    )
    assert {"REMOE_EVAL_CACHE", "REMOE_FINETUNE_SET", "REMOE_TRACE_RECORD_NEW_TOKENS", "REMOE_RUNS_JSON"} <= set(names)
