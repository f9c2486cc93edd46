"""What all commands share: --quiet and --verbose before or after the verb, and defaults from the settings file and REMOE_*."""

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from remoe_cli import __version__, config, console
from remoe_cli.errors import command, RemoeError, UsageError

_FOUND, _FAILED = "remoe.settings", "remoe.settings.error"
_ANYWHERE = ("quiet", "verbose")


class Root(TyperGroup):
    """The command `remoe` itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        console.say_as_usual()
        try:
            ctx.meta[_FOUND] = settings(self, ctx)
            ctx.default_map = _nested(self, ctx.meta[_FOUND])
        except RemoeError as error:
            ctx.meta[_FAILED] = error  # --help, --version and `remoe doctor` work all the same
        everywhere = [_hidden(one) for one in self.params if one.name in _ANYWHERE]
        for _, one in _commands(self):
            one.params += everywhere
        return super().parse_args(ctx, args)


def settings(root: Any, context: Any) -> list[config.Default]:
    """What file and environment say, each value as the command line takes it. Raises UsageError."""
    options = _options(root)
    found = config.defaults({words: {key: _kind(one) for key, one in by.items()} for words, by in options.items()})
    for one in found:
        option = options[one.words][one.option]
        try:
            if _kind(option) != "flag":
                option.process_value(context, one.value)
        except typer.BadParameter as error:
            raise UsageError(f"{one.source}: {error.message}", command(*one.words, help=True)) from None
    return found


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"remoe {__version__}")
        raise typer.Exit()


def _quiet(wanted: bool) -> None:
    if wanted:
        console.say_less()


def _verbose(context: typer.Context, wanted: bool) -> None:
    if wanted and not console.verbose():
        console.say_more()
        if context.parent is not None:  # after the verb; before it the verb is not known yet
            _tell(context.find_root())


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", callback=_quiet, help="No notes, no progress. Also after the command.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", callback=_verbose, help="Say more, and where an error was raised. Also after."),
    ] = False,
) -> None:
    if context.invoked_subcommand == "doctor":
        return
    if (error := context.meta.get(_FAILED)) is not None:
        raise error
    if console.verbose():
        _tell(context)


def _tell(top: Any) -> None:
    """What the command goes by that was not typed."""
    for one in top.meta.get(_FOUND, ()):
        if one.words[:1] == (top.invoked_subcommand,):
            console.detail(f"{' '.join(one.words)} --{one.option}: {one.value} if it is not given ({one.source})")


def _commands(group: Any, words: config.Words = ()) -> Iterator[tuple[config.Words, Any]]:
    for name, one in group.commands.items():
        yield (*words, name), one
        if hasattr(one, "commands"):
            yield from _commands(one, (*words, name))


def _options(root: Any) -> dict[config.Words, dict[str, Any]]:
    """By the words of a command and the long name of an option; eager ones, as --version, end the command and are left out."""
    return {
        words: {_key(one): one for one in by.params if one.param_type_name == "option" and not one.is_eager}
        for words, by in [((), root), *_commands(root)]
    }


def _key(option: Any) -> str:
    return max(option.opts, key=len).lstrip("-")


def _kind(option: Any) -> config.Kind:
    return "flag" if option.is_flag else "list" if option.multiple else "value"


def _nested(root: Any, found: list[config.Default]) -> Mapping[str, Any]:
    """As the command line's library takes defaults: by parameter, those of a subcommand one level deeper."""
    options, top = _options(root), dict[str, Any]()
    for one in found:
        level = top
        for word in one.words:
            level = level.setdefault(word, {})
        level[options[one.words][one.option].name] = one.value
    return top


def _hidden(option: Any) -> Any:
    """Left out of help and not handed to the command; its callback does all."""
    other = copy.copy(option)
    other.hidden, other.expose_value = True, False
    return other
