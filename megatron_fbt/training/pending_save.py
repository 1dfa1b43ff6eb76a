"""A checkpoint on its way to the disk, in a thread beside training if that is wanted."""

import contextlib
import dataclasses
import threading
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from megatron_fbt.core.checkpoint_write import PlannedSave, Written
from megatron_fbt.core.pieces import Piece
from megatron_fbt.errors import BadNumbersError
from megatron_fbt.training.run_folder import TrainerState


class Staging:
    """Memory that copies of pieces are made in, once for all saves: taking new memory each time costs more."""

    def __init__(self) -> None:
        self._tensors: Dict[Tuple[str, Tuple[int, ...]], torch.Tensor] = {}

    def ready(self, pieces: List[Piece]) -> Optional[torch.cuda.Event]:
        """Mark where on the GPU, in the thread that trains, the pieces have the values to copy; None without a GPU."""
        if not any(piece.tensor.is_cuda for piece in pieces):
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextlib.contextmanager
    def beside(self, ready: Optional[torch.cuda.Event]) -> Iterator[None]:
        """Work on the GPU beside its other work, from a mark on; ends when it is done."""
        if ready is None:
            yield
            return
        stream = torch.cuda.Stream(ready.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            yield
        stream.synchronize()

    @torch.no_grad()
    def copy(self, pieces: List[Piece]) -> List[Piece]:
        """Copies on the CPU, valid until the next call; from a GPU, when its stream has made them."""
        copied = []
        for piece in pieces:
            tensor = self._tensors.get(piece.key)
            if tensor is None:
                tensor = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
                self._tensors[piece.key] = tensor
            tensor.copy_(piece.tensor, non_blocking=True)
            copied.append(dataclasses.replace(piece, tensor=tensor))
        return copied


class PendingSave:
    """A checkpoint of which this rank writes its part, in a thread if training is to go on meanwhile.

    Args:
        planned: what to write.
        pieces: the planned ones.
        weights: all of this rank, also those that another one writes.
        state: of the run.
        config_yaml: its configuration.
        facts: for the manifest.
    """

    def __init__(
        self,
        planned: PlannedSave,
        pieces: List[Piece],
        weights: List[Piece],
        state: TrainerState,
        config_yaml: str,
        facts: Dict[str, Any],
    ):
        self.planned, self.state, self.config_yaml, self.facts = planned, state, config_yaml, facts
        self._pieces, self._weights = pieces, weights
        self._written: Optional[Written] = None
        self._error: Optional[Exception] = None
        self._thread: Optional[threading.Thread] = None
        self._copied = threading.Event()

    def start(self, staging: Staging) -> None:
        """Begin to copy the pieces, and to write the copies, in a thread; they must not change before wait_for_copy."""
        work = (staging, staging.ready(self._pieces))
        self._thread = threading.Thread(target=self._copy_and_write, args=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the pieces may change."""
        if self._thread is not None:
            self._copied.wait()

    @property
    def busy(self) -> bool:
        """Whether the thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> Written:
        """Write this rank's part, or wait for the thread that does.

        Raises:
            CheckpointError: it could not be written.
            BadNumbersError: a weight is not finite.
        """
        if self._thread is None:
            _refuse_bad_weights(self._weights, self.state.step)
            return self.planned.write()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._written

    def _copy_and_write(self, staging: Staging, ready: Optional[torch.cuda.Event]) -> None:
        try:
            with staging.beside(ready):
                _refuse_bad_weights(self._weights, self.state.step)
                self.planned.planner.take(staging.copy(self._pieces))
            self._copied.set()
            self._written = self.planned.write()
        except Exception as error:
            self._error = error
        finally:
            self._copied.set()


@torch.no_grad()
def _refuse_bad_weights(pieces: List[Piece], step: int) -> None:
    for piece in pieces:
        extremes = torch.aminmax(piece.tensor) if piece.tensor.numel() else ()  # no memory for another tensor
        if not all(torch.isfinite(extreme) for extreme in extremes):
            raise BadNumbersError(
                f"step {step}: weight {piece.name} holds numbers that are not finite; no checkpoint was written. "
                "Resume from the one before, with a lower optimizer.lr"
            )
