"""The parts of a GGUF: one file, or NAME-00001-of-0000N.gguf and its neighbours."""

import re
from pathlib import Path

from remoe_cli.errors import CheckpointError
from remoe_cli.gguf.header import damaged, Header, read_header

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_parts(file: Path) -> list[Header]:
    """The headers of all parts, in order, from any one of them. Raises CheckpointError for a missing or foreign part."""
    asked = read_header(file)
    count = asked.number("split.count") or 1
    if count == 1:
        return [asked]
    named = _PART.fullmatch(file.name)
    if not named or int(named["count"]) != count:
        raise CheckpointError(
            f"{file} is one of {count} parts, so its name must end in -NNNNN-of-{count:05d}.gguf.", f"ls {file.parent}"
        )
    headers = []
    for number in range(1, count + 1):
        part = file.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{file} is one of {count} parts, and {part.name} is not there.", f"ls {file.parent}")
        header = read_header(part)
        if (header.number("split.no"), header.number("split.count")) != (number - 1, count):
            raise damaged(part, f"its header does not say that it is part {number} of {count}")
        headers.append(header)
    names = [name for header in headers for name in header.tensors]
    expected = headers[0].number("split.tensors.count")
    if len(set(names)) != len(names) or expected not in (None, len(names)):
        raise damaged(file, f"its parts do not belong together ({len(set(names))} tensors of {expected})")
    return headers
