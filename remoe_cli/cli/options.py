"""Options that several commands take."""

from typing import Annotated, Optional

import typer

Device = Annotated[Optional[str], typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one.")]  # noqa: UP045
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
