"""Writes docs/commands.md and docs/commands/, a page a command, from the command line itself:  python docs/make_commands.py"""

from pathlib import Path

from typer.main import get_command

from remoe_cli.cli import app

DOCS = Path(__file__).parent
# guides beside the one of the command's own name
GUIDES = {
    "finetune": ["training", "recipes", "data", "many-devices"],
    "eval": ["report", "tasks"],
    "push": ["hub"],
    "pull": ["hub"],
    "apply": ["gguf", "serving"],
    "inspect": ["formats", "families"],
    "diff": ["formats"],
    "merge": ["formats"],
    "plan": ["training", "decode"],
    "chat": ["generate"],
    "doctor": ["terminal"],
    "trace": ["trace-format"],
    "replay": ["policies"],
    "recipes": ["recipes"],
    "runs": ["runs"],
}


def pages() -> dict[str, str]:
    """Each page's text by its path under docs/."""
    commands = get_command(app).commands
    overview = [
        "# Commands",
        "",
        "Written by `python docs/make_commands.py`. Exit codes: 0 done, 1 error, 2 wrong usage, 3 `--fail-on-regress`,",
        "130 Ctrl-C; options that every command takes, settings and colours: [terminal](terminal.md).",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    overview += [f"| [`remoe {name}`](commands/{name}.md) | {_first(command)} |" for name, command in commands.items()]
    return {
        "commands.md": "\n".join([*overview, ""]),
        **{f"commands/{name}.md": _page(name, command) for name, command in commands.items()},
    }


def _page(name: str, command) -> str:
    lines = [f"# remoe {name}", "", *_body(f"remoe {name}", command)]
    for part, inner in getattr(command, "commands", {}).items():
        lines += [f"## remoe {name} {part}", "", *_body(f"remoe {name} {part}", inner)]
    guides = dict.fromkeys([name, *GUIDES.get(name, [])])
    links = [f"[{guide}](../{guide}.md)" for guide in guides if (DOCS / f"{guide}.md").exists()]
    lines += [f"More: {', '.join(links)}", ""] if links else []
    return "\n".join([*lines, "[All commands](../commands.md)", ""])


def _body(words: str, command) -> list[str]:
    parameters = [one for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
    places = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in parameters if not _is_option(p)]
    usage = " ".join([words, *places, *(["[OPTIONS]"] if any(map(_is_option, parameters)) else [])])
    rows = [_row(parameter) for parameter in parameters]
    table = ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    shown = [] if hasattr(command, "commands") else [f"    {usage}", ""]
    return [*(command.help or "").split("\n"), "", *shown, *table]


def _first(command) -> str:
    """Its first paragraph."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _is_option(parameter) -> bool:
    return parameter.param_type_name == "option"


def _row(parameter) -> str:
    names = [f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts]]
    shown = ", ".join(names) if _is_option(parameter) else f"`{parameter.name.upper()}`"
    plain = parameter.default not in (None, False, ()) and not callable(parameter.default)
    default = "required" if parameter.required else parameter.default if plain else ""
    meaning = (getattr(parameter, "help", "") or "").replace("<", "&lt;")  # else a browser takes it for a tag
    return f"| {shown} | {meaning} | {default} |"


def main() -> None:
    wanted = pages()
    (DOCS / "commands").mkdir(exist_ok=True)
    for stale in set((DOCS / "commands").glob("*.md")) - {DOCS / name for name in wanted}:
        stale.unlink()
    for name, text in wanted.items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
