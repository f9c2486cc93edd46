"""What of a model's weights is not here yet, and whether the disk has room for it."""

import shutil
from pathlib import Path
from typing import Any

from remoe_cli.errors import HubError
from remoe_cli.hub.download import cached, RemoteFile, total_size
from remoe_cli.hub.failures import cache
from remoe_cli.hub.headers import Headers
from remoe_cli.hub.resolve import Found, weight_files
from remoe_cli.sizes import show_size


def weight_files_here(found: Found, headers: Headers) -> tuple[list[Path], dict[str, RemoteFile]]:
    """Those that are here, and those of the Hub that are not."""
    if found.commit is None or found.files is None:
        return ([] if headers.absent else headers.files), {}
    names = weight_files(found, found.files)
    held = {name: cached(found.id, name, found.commit) for name in names}
    return [path for path in held.values() if path], {name: found.files[name] for name in names if not held[name]}


def disk_room(found: Found, absent: dict[str, RemoteFile]) -> dict[str, Any]:
    """folder: where the files lie or will lie; needed: bytes that will come; free: bytes that are free there."""
    folder = found.folder if found.commit is None else cache()
    place = next(one for one in (folder, *folder.parents) if one.exists())
    return {"folder": str(place), "needed": total_size(absent) or 0, "free": shutil.disk_usage(place).free}


def require_disk(name: str, disk: dict[str, Any]) -> None:
    """Raises HubError where what `disk_room` found is too little."""
    if disk["needed"] > disk["free"]:
        raise HubError(
            f"{name} needs {show_size(disk['needed'])} more on the disk of {disk['folder']}, where {show_size(disk['free'])} are free.",
            "HF_HOME=/a/disk/with/room before the same command",
        )
