"""The form `copy`: a full checkpoint, byte-identical to the base but for the gates."""

import os
import shutil
from pathlib import Path

from remoe_cli import atomic
from remoe_cli.copies import copy_files
from remoe_cli.delta.delta import Delta
from remoe_cli.delta.forms import beside_weights, gates_to_write, note_applied, require_written
from remoe_cli.delta.stored import stored_bytes
from remoe_cli.hub.checkpoint import Checkpoint, INDEX


def patched_copy(delta: Delta, checkpoint: Checkpoint, out: Path, cast: bool = False) -> Path:
    """A full copy of the checkpoint in which only the gates' bytes differ: safe for every loader.

    Takes no room for the weights where the file system shares blocks. Raises DeltaError for the wrong base, RunError when
    `out` is taken, not writable or the disk too small.
    """
    gates = gates_to_write(delta, checkpoint, cast, keep_f32=False)
    by_file: dict[Path, dict] = {}
    for name, tensor in gates.items():
        by_file.setdefault(checkpoint.tensors[name].file, {})[name] = tensor
    with atomic.new_folder(out) as scratch:
        copy_files(checkpoint.files, scratch, out)
        for path in [*beside_weights(checkpoint), checkpoint.folder / INDEX]:
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)
        for file, inside in by_file.items():
            with open(scratch / file.name, "r+b") as stream:
                for name, tensor in inside.items():
                    stream.seek(checkpoint.tensors[name].offset)
                    stream.write(stored_bytes(tensor))
                stream.flush()
                os.fsync(stream.fileno())
            require_written(scratch / file.name, inside)
        note_applied(scratch, delta, "copy")
    return out
