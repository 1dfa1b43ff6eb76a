"""TensorBoard events of a run."""

import math
import re
from pathlib import Path
from typing import Any, Mapping, Union

_PASS_FIELD = re.compile(r"(validation_loss_pass|loss_pass|pass_share)_(\d+)")


def tag_of(field: str) -> str:
    """Tag of a metrics field: losses of one kind and pass shares have groups, everything else stands under train/."""
    match = _PASS_FIELD.fullmatch(field)
    if match:
        return f"{match[1].removesuffix('_pass')}/pass_{match[2]}"
    return f"train/{field}"


class TensorBoardLog:
    """Writes the numbers of each row; does nothing when switched off. Only one process of a run writes."""

    def __init__(self, folder: Union[str, Path], enabled: bool = True, first_step: int = 0) -> None:
        """Open an event file.

        Args:
            folder: usually <run.dir>/tensorboard.
            enabled: False makes every method do nothing.
            first_step: the step at which this process starts; events of an earlier process from this step on are
                hidden by TensorBoard, so that a resumed run shows each step once.
        """
        self._writer = None
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Write the finite numbers of one row of metrics.jsonl at its `step`."""
        if self._writer is None:
            return
        for field, value in row.items():
            if field != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(tag_of(field), value, row["step"])

    def log_text(self, name: str, text: str) -> None:
        """Write a text, for example the resolved configuration, as a code block."""
        if self._writer is not None:
            self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()))

    def close(self) -> None:
        """Write what is buffered and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
