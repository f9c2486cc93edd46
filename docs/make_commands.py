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
    for name, command in root.commands.items():
        lines += [
            f"## remoe {name}",
            "",
            *(command.help or "").split("\n"),
            "",
            "| argument or option | meaning | default |",
            "|---|---|---|",
        ]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            is_option = parameter.param_type_name == "option"
            shown = (
                ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])
                if is_option
                else f"`{parameter.name.upper()}`"
            )
            default = (
                parameter.default
                if parameter.default not in (None, False, ()) and not callable(parameter.default)
                else ""
            )
            required = "required" if parameter.required else default
            lines.append(f"| {shown} | {getattr(parameter, 'help', '') or ''} | {required} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page())
