"""Rows read ahead of training by processes of their own: PyTorch's DataLoader, told which samples will come.

The processes come from a fork server. A fork of the training process itself would copy locks of its threads (gloo,
checkpoints written in the background) in whatever state they are, and the state of a GPU that it cannot use; starting
each from nothing would import PyTorch and Megatron-Core as many times. The server is started while the model is built,
imports what is needed once, has no thread and no GPU, and its copies cost milliseconds. What is ahead is only a guess:
each read names its samples, and where others come (after a resume or a rewind) reading ahead begins anew.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections import deque
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import Any, Callable, Deque, Iterator, List, Optional, Sequence, Union

import torch
from torch.utils.data import DataLoader

from megatron_fbt.data.batch import BatchReader, read_rows
from megatron_fbt.data.handover import pack, unpack
from megatron_fbt.errors import DataError

Ids = List[List[int]]
"""[m][b] sample numbers of micro-batches."""

GPU_WORKERS = 2
PARTS_PER_WORKER = 2
"""A step is read in at most so many parts for each worker: few, for each holds open files on its way."""
PARTS_AHEAD = 2 * PARTS_PER_WORKER
"""What a worker has read or is reading: its part of two steps."""
QUIET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A terminal or a job manager sends them to all processes; the training process alone acts on them."""


def rows_ahead(
    num_workers: Optional[int], dataset: Any, eod: int, reader: BatchReader, coming: Callable[[], Iterator[Ids]]
) -> Optional["RowsAhead"]:
    """What reads ahead on this rank; None where it reads for itself or does not read.

    Args:
        num_workers: data.num_workers; None = 2 on a GPU, 0 on a CPU, whose cores have work.
        dataset: rows.
        eod: id of the end-of-document token.
        reader: this rank's part.
        coming: see RowsAhead.
    """
    on_gpu = reader.device.type == "cuda"
    if num_workers is None:
        num_workers = GPU_WORKERS if on_gpu else 0
    if num_workers == 0 or not reader.reads:
        return None
    fields = reader.fields(getattr(dataset, "marked", False))
    return RowsAhead(dataset, eod, fields, coming, num_workers, pin_memory=on_gpu)


class RowsAhead:
    """Reads the rows of coming steps in processes of its own.

    Args:
        dataset: rows; it must be picklable.
        eod: id of the end-of-document token.
        fields: what is read, see BatchReader.fields.
        coming: gives the sample numbers of the steps to come, those of the step that begins first.
        num_workers: processes, at least 1.
        pin_memory: give tensors from which copies to a GPU need not be waited for.
    """

    def __init__(
        self,
        dataset: Any,
        eod: int,
        fields: Sequence[str],
        coming: Callable[[], Iterator[Ids]],
        num_workers: int,
        pin_memory: bool = False,
    ):
        self._source = _RowSource(pack(dataset), eod, list(fields))
        self._coming, self._num_workers, self._pin_memory = coming, num_workers, pin_memory
        self._expected: Deque[Ids] = deque()
        self._loader: Optional[DataLoader] = None
        self._iterator: Optional[Iterator[Union[torch.Tensor, bytes]]] = None
        self._processes: List[Any] = []
        weakref.finalize(self, _kill, self._processes)  # they do not listen to what ends daemons at exit
        multiprocessing.set_forkserver_preload([type(dataset).__module__, __name__])
        with _signals_held():
            forkserver.ensure_running()

    def read(self, ids: Ids) -> List[torch.Tensor]:
        """The rows of micro-batches, as soon as they are there.

        Returns:
            Tensors int32 [n, fields, b, s] whose n sum up to m, see read_rows.

        Raises:
            DataError: a sample cannot be read, or a process has died.
        """
        parts = self._parts(ids)
        if list(islice(self._expected, len(parts))) != parts:
            self._begin()
            assert list(islice(self._expected, len(parts))) == parts, "what is to come begins with what is asked for"
        return [self._next() for _ in parts]

    def close(self) -> None:
        """End the processes; a later read starts others."""
        self._expected.clear()
        self._loader = self._iterator = None  # the iterator ends them
        _kill(self._processes)

    def _parts(self, ids: Ids) -> List[Ids]:
        """Micro-batches of a step in the parts that are read at once."""
        count = min(len(ids), PARTS_PER_WORKER * self._num_workers)
        bounds = [len(ids) * part // count for part in range(count + 1)]
        return [ids[begin:end] for begin, end in zip(bounds, bounds[1:])]

    def __iter__(self) -> Iterator[Ids]:
        """The parts of the steps to come, for the DataLoader, which asks some parts ahead."""
        for ids in self._coming():
            for part in self._parts(ids):
                self._expected.append(part)
                yield part

    def _begin(self) -> None:
        """Read from the step on that begins now."""
        self._expected.clear()
        if self._loader is None:
            self._loader = DataLoader(
                self._source,
                batch_sampler=self,
                num_workers=self._num_workers,
                collate_fn=_as_it_is,
                pin_memory=self._pin_memory,
                worker_init_fn=_settle,
                multiprocessing_context="forkserver",
                generator=torch.Generator(),  # the default one is that of dropout
                prefetch_factor=PARTS_AHEAD,
                persistent_workers=True,
            )
        before = multiprocessing.active_children()
        with _signals_held(), self._told_of_deaths():
            self._iterator = iter(self._loader)
        self._processes += [process for process in multiprocessing.active_children() if process not in before]

    def _next(self) -> torch.Tensor:
        self._expected.popleft()
        with self._told_of_deaths():
            found = next(self._iterator)
        if isinstance(found, bytes):
            raise pickle.loads(found)
        return found

    @contextlib.contextmanager
    def _told_of_deaths(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the DataLoader's: of a dead process, or of a pipe or memory that went with it
            self.close()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"a process that reads data ahead died ({reason}), killed perhaps for lack of memory or of space in "
                f"/dev/shm; the same command resumes the run. Set data.num_workers below {self._num_workers}; with 0 "
                "the training process reads by itself"
            ) from error


class _RowSource(torch.utils.data.Dataset):
    """What a worker has: it opens the data set with the first rows that it is asked for."""

    def __init__(self, packed: bytes, eod: int, fields: List[str]):
        self._packed, self._eod, self._fields = packed, eod, fields
        self._rows: Any = None

    def __getitems__(self, ids: Ids) -> Union[torch.Tensor, bytes]:
        """Rows [n, fields, b, s]; or the error, pickled, for the DataLoader would change its text."""
        try:
            if self._rows is None:
                self._rows = unpack(self._packed)
            return read_rows(self._rows, torch.tensor(ids, dtype=torch.int64), self._eod, self._fields)
        except Exception as error:
            try:
                packed = pickle.dumps(error)
                pickle.loads(packed)
                return packed
            except Exception:
                return pickle.dumps(DataError(f"{type(error).__name__}: {error}"))


def _as_it_is(found: Any) -> Any:
    return found


def _settle(worker: int) -> None:
    """First act of a worker: leave signals to the training process, and do not survive it."""
    for number in QUIET_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_it() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


def _kill(processes: List[Any]) -> None:
    """End what has not ended."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    processes.clear()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Start processes that get none of these signals before they ignore them; this one gets them afterwards."""
    resource_tracker.ensure_running()  # it would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
