"""Micro-batches: read by one tensor-parallel rank of each pipeline stage, broadcast to the others of that stage.

Shapes: m micro-batches, b samples in each, s tokens in a sample.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from megatron_fbt.errors import DataError

_OK, _FAILED = 0, 1


@dataclass
class MicroBatch:
    """What one pipeline stage needs of a micro-batch, on the stage's device.

    Attributes:
        tokens: [b, s] int64 on the first stage, else None.
        labels: [b, s] int64 on the last stage, else None. What position t is scored against: the token of position
            t + 1, unless the data have labels of their own.
        loss_mask: [b, s] float32 on the last stage, else None.
        document_starts: [b, s] bool, true where a document begins: at position 0 and, unless the data say otherwise,
            after an end-of-document token.
        sample_ids: [b] int64, places in the global consumed order (not wrapped).
        feedback_region: [b, s] bool where the data have it (conversations, labelled rows), true where the input token
            is one that the model generates when it decodes: the assistant's; else None.
        on_host: document_starts, sample_ids and feedback_region in the CPU's memory, where the device is another one.
    """

    tokens: Optional[torch.Tensor]
    labels: Optional[torch.Tensor]
    loss_mask: Optional[torch.Tensor]
    document_starts: torch.Tensor
    sample_ids: torch.Tensor
    feedback_region: Optional[torch.Tensor] = None
    on_host: Optional["MicroBatch"] = None

    @property
    def host(self) -> "MicroBatch":
        """What can be asked without waiting for a device, see on_host; a batch that has none is read back."""
        if self.on_host is not None or self.document_starts.device.type == "cpu":
            return self.on_host or self
        region = None if self.feedback_region is None else self.feedback_region.cpu()
        return MicroBatch(None, None, None, self.document_starts.cpu(), self.sample_ids.cpu(), region)


@dataclass(frozen=True)
class BatchReader:
    """A rank's part in reading.

    Attributes:
        tp_group: Tensor-parallel group for the broadcast; None = this rank reads alone. With a gloo group the data
            travel between CPUs and no rank waits for its GPU.
        tp_rank: Rank in that group; rank 0 reads.
        is_first_stage: First pipeline stage: gets tokens.
        is_last_stage: Last pipeline stage: gets labels and loss mask.
        device: Where the tensors end up.
    """

    tp_group: Optional[Any]
    tp_rank: int
    is_first_stage: bool
    is_last_stage: bool
    device: torch.device

    @property
    def reads(self) -> bool:
        """Whether this rank reads; the others of its group receive."""
        return self.tp_group is None or self.tp_rank == 0

    def fields(self, marked: bool = False) -> List[str]:
        """Names of what is sent in the stage.

        Args:
            marked: whether the rows themselves say where documents start and what is fed back; if not, document starts
                follow from the tokens where those are there.
        """
        names = ["tokens"] if self.is_first_stage else []
        names += ["document_starts"] if marked or not self.is_first_stage else []
        names += ["feedback_region"] if marked else []
        return names + ["labels", "loss_mask"] if self.is_last_stage else names


def load_micro_batches(
    dataset, sample_ids_per_micro_batch: Sequence[Sequence[int]], eod: int, reader: BatchReader, ahead: Any = None
) -> List[MicroBatch]:
    """Load the micro-batches of one step with a single broadcast in the tensor-parallel group.

    Sample number i is row ``i mod len(dataset)``: numbers beyond the end start again from the first row.

    Args:
        dataset: Rows as megatron_fbt.data.dataset.Rows gives them: ``len``, items with tokens, labels and loss_mask
            [s], and ``sequence_length``; with ``marked`` true also document_starts and feedback_region [s].
        sample_ids_per_micro_batch: [m][b] sample numbers, equal on all ranks of the group.
        eod: Id of the end-of-document token.
        reader: This rank's part.
        ahead: A megatron_fbt.data.loader.RowsAhead that has read the rows; None = they are read now.

    Raises:
        DataError: A sample cannot be read; on all ranks of the group.
    """
    if not sample_ids_per_micro_batch:
        return []
    sample_ids = torch.tensor(sample_ids_per_micro_batch, dtype=torch.int64)
    length = getattr(dataset, "sequence_length", None) or len(dataset[0]["tokens"])
    fields = reader.fields(getattr(dataset, "marked", False))

    def read() -> List[torch.Tensor]:
        if ahead is not None:
            return ahead.read(sample_ids.tolist())
        return [read_rows(dataset, sample_ids, eod, fields)]

    shape = (sample_ids.shape[0], len(fields), sample_ids.shape[1], length)
    parts = _receive(read, sample_ids, reader, shape)
    content = [part.to(reader.device, non_blocking=True) for part in parts]
    micro_batches = _unpack(content, sample_ids.to(reader.device, non_blocking=True), eod, fields)
    if reader.device.type != "cpu" and parts[0].device.type == "cpu":
        for batch, host in zip(micro_batches, _unpack(parts, sample_ids, eod, fields, of_host=True), strict=True):
            batch.on_host = host
    return micro_batches


def _receive(
    read: Callable[[], List[torch.Tensor]], sample_ids: torch.Tensor, reader: BatchReader, shape
) -> List[torch.Tensor]:
    """Tensors [n, fields, b, s] int32 whose n sum up to m, read or received; the status travels in front of them."""
    if reader.tp_group is None:
        return read()
    message = torch.zeros(1 + torch.Size(shape).numel(), dtype=torch.int32, pin_memory=reader.device.type == "cuda")
    failure = None
    if reader.reads:
        try:
            torch.cat(read(), out=message[1:].view(shape))
        except Exception as error:  # the others wait for this message, whatever went wrong
            failure = error
            message[0] = _FAILED
    if "gloo" not in dist.get_backend(reader.tp_group):
        message = message.to(reader.device)
    dist.broadcast(message, src=dist.get_global_rank(reader.tp_group, 0), group=reader.tp_group)
    if failure is not None:
        raise failure
    if not reader.reads and int(message[0]) != _OK:
        raise DataError(
            f"samples {int(sample_ids.min())} to {int(sample_ids.max())} cannot be read; tensor-parallel rank 0 of "
            "this stage says why"
        )
    return [message[1:].view(shape)]


def read_rows(dataset, sample_ids: torch.Tensor, eod: int, fields: List[str]) -> torch.Tensor:
    """Rows by number.

    Args:
        dataset: See load_micro_batches.
        sample_ids: [m, b].
        eod: Id of the end-of-document token.
        fields: See BatchReader.fields.

    Returns:
        [m, fields, b, s] int32; a mask has the bits of its float32.

    Raises:
        DataError: There is no row, or one cannot be read.
    """
    if len(dataset) == 0:
        raise DataError("the data set has no sample")
    rows = [dataset[number % len(dataset)] for number in sample_ids.flatten().tolist()]
    columns = []
    for name in fields:
        if name == "document_starts" and name not in rows[0]:
            column = document_starts(torch.stack([row["tokens"] for row in rows]), eod)
        else:
            column = torch.stack([row[name] for row in rows])
        # The bits of a float32 mask travel as they are.
        columns.append(column.float().view(torch.int32) if name == "loss_mask" else column.to(torch.int32))
    m, b = sample_ids.shape
    return torch.stack([column.view(m, b, -1) for column in columns], dim=1)


def document_starts(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """[b, s] bool: position 0 and every position after an end-of-document token.

    Args:
        tokens: [b, s].
        eod: Id of the end-of-document token.
    """
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == eod
    return starts


def _unpack(
    parts: List[torch.Tensor], sample_ids: torch.Tensor, eod: int, fields: List[str], of_host: bool = False
) -> List[MicroBatch]:
    """Micro-batches from their [n, fields, b, s] int32; of_host: without what the layers alone ask for."""
    content = (micro_batch for part in parts for micro_batch in part)
    rows = (dict(zip(fields, columns, strict=True)) for columns in content)
    return [_micro_batch(found, numbers, eod, of_host) for found, numbers in zip(rows, sample_ids, strict=True)]


def _micro_batch(found: Dict[str, torch.Tensor], sample_ids: torch.Tensor, eod: int, of_host: bool) -> MicroBatch:
    """One micro-batch from its fields, each [b, s] int32."""
    starts, region = found.get("document_starts"), found.get("feedback_region")
    batch = MicroBatch(
        tokens=None,
        labels=None,
        loss_mask=None,
        document_starts=document_starts(found["tokens"], eod) if starts is None else starts.bool(),
        sample_ids=sample_ids,
        feedback_region=None if region is None else region.bool(),
    )
    if not of_host:
        batch.tokens, batch.labels = (found[name].long() if name in found else None for name in ("tokens", "labels"))
        batch.loss_mask = found["loss_mask"].contiguous().view(torch.float32) if "loss_mask" in found else None
    return batch
