"""Folders that appear whole or not at all.

An export is written beside its place, as .NAME.partial-HOST-PID, and renamed when it is complete; config.json comes
last, so that no earlier state of the folder can be loaded.
"""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Iterator, List, Union

from megatron_fbt.data.huggingface_files import TOKENIZER_FILES
from megatron_fbt.errors import ConfigError
from megatron_fbt.hf.configuration_fbt import FBTConfig

REPORT_FILE = "fbt_export.json"
"""Says that a folder is an export, and what was exported."""


def output_place(output: Union[str, Path]) -> Path:
    """The absolute path of an output folder; of a symbolic link, the folder that it names.

    Raises:
        ConfigError: A link that leads round in circles.
    """
    place = Path(output).absolute()
    try:
        return place.resolve(strict=False) if place.is_symlink() else place
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"output {place}: is a symbolic link to itself. Choose another folder.") from error


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that is in use; with `force`, only another export may be replaced.

    What interrupted exports to the same place have left behind goes first, or comes back.

    Raises:
        ConfigError: The folder may not be written.
    """
    sweep(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not force:
        raise ConfigError(f"output {output}: exists and is not empty. Choose another folder, or add --force.")
    if not (is_export(output) or (output / REPORT_FILE).is_file()):
        raise ConfigError(f"output {output}: is not an exported model, so --force does not replace it.")


def is_export(folder: Path) -> bool:
    """Whether a folder holds an exported model with this package's own code."""
    try:
        return (
            json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") == FBTConfig.model_type
        )
    except (OSError, ValueError, AttributeError):
        return False


def tokenizer_files(folder: Path) -> List[str]:
    """The files of a tokenizer that a folder holds."""
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


@contextlib.contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """A new folder beside `output`; removed at the end unless it has been moved."""
    partial = output.with_name(f".{output.name}.partial-{_owner()}")
    try:
        partial.mkdir(parents=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def move_into_place(partial: Path, output: Path) -> None:
    """Rename the finished folder; an earlier export goes only once the new one stands in its place."""
    old = output.with_name(f".{output.name}.old-{_owner()}")
    replaced = output.exists()
    if replaced:
        os.replace(output, old)
    try:
        os.replace(partial, output)
    except OSError:
        if replaced:
            os.replace(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _owner() -> str:
    """This process, as part of a folder's name."""
    return f"{socket.gethostname()}-{os.getpid()}"


def sweep(output: Path) -> None:
    """Remove the folders of processes of this host that have ended; an export that one had set aside comes back."""
    for kind in ("old", "partial"):
        prefix = f".{output.name}.{kind}-{socket.gethostname()}-"
        for leftover in sorted(output.parent.glob(f"{_escaped(prefix)}*")) if output.parent.is_dir() else []:
            number = leftover.name.removeprefix(prefix)
            if not number.isdigit() or _runs(int(number)):
                continue
            if kind == "old" and not output.exists():
                os.replace(leftover, output)
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def _escaped(name: str) -> str:
    """A name as glob takes it literally."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
