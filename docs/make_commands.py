"""Writes docs/commands.md from the command line itself:  python docs/make_commands.py"""

from pathlib import Path

from typer.main import get_command

from remoe_cli.cli import app


def page() -> str:
    root = get_command(app)
    lines = [
        "# Commands",
        "",
        "Written by `python docs/make_commands.py`. Exit codes: 0 done, 1 error, 2 wrong usage,",
        "3 `--fail-on-regress`, 130 Ctrl-C.",
        "",
    ]
    for name, command in _every(root):
        lines += [f"## remoe {name}", "", *(command.help or "").split("\n"), ""]
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        lines += ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def _every(group, prefix: str = "") -> list:
    """(words after `remoe`, command), those of groups too."""
    found = []
    for name, command in group.commands.items():
        found.append((prefix + name, command))
        if hasattr(command, "commands"):
            found += _every(command, f"{prefix}{name} ")
    return found


def _row(parameter) -> str:
    names = [f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts]]
    shown = ", ".join(names) if parameter.param_type_name == "option" else f"`{parameter.name.upper()}`"
    plain = parameter.default not in (None, False, ()) and not callable(parameter.default)
    default = "required" if parameter.required else parameter.default if plain else ""
    return f"| {shown} | {getattr(parameter, 'help', '') or ''} | {default} |"


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page())
