"""What a run reads of each source, told before it starts."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from megatron_fbt.data.interleave import apportion
from megatron_fbt.text_table import table_lines

FILE = "data_plan.json"
"""Its name in a run folder."""


@dataclass(frozen=True)
class SourcePlan:
    """What training reads of one source; None where the data are not there to be counted."""

    name: str
    pairs: Optional[int]
    """.bin/.idx pairs."""
    documents: Optional[int]
    """For training."""
    epoch_tokens: Optional[int]
    """Tokens of these documents."""
    rows: int
    """That the run reads."""
    tokens: int
    """That it reads, each time counted."""
    share: float
    """Of the run's rows."""
    epochs: Optional[float]
    """tokens over epoch_tokens."""
    max_epochs: Optional[float]
    tail_tokens: Optional[int]
    """Tokens at the end of the last epoch that the run begins which fill no row, and are in none."""
    valid_documents: Optional[int]
    valid_tokens: Optional[int]
    """Of its documents for validation."""


@dataclass(frozen=True)
class StagePlan:
    """A stretch of the run with the same shares."""

    first_step: int
    first_sample: int
    samples: int
    rows: Dict[str, int]
    """Of each source."""

    @property
    def shares(self) -> Dict[str, float]:
        """Of each source that has a part."""
        return {name: rows / self.samples for name, rows in self.rows.items() if rows}


@dataclass(frozen=True)
class DataPlan:
    """All sources and stages of a run."""

    sequence_length: int
    samples: int
    sources: Tuple[SourcePlan, ...]
    stages: Tuple[StagePlan, ...]

    def as_dict(self) -> Dict[str, Any]:
        """Ready for JSON."""
        plan = dataclasses.asdict(self)
        for stage, content in zip(self.stages, plan["stages"], strict=True):
            content["shares"] = stage.shares
        return plan

    def describe(self) -> str:
        """Tables for a person."""
        columns = ["source", "share", "rows", "tokens", "epochs", "of tokens", "in documents", "tail"]
        rows = [
            [
                source.name,
                f"{source.share:.4%}",
                *map(_number, (source.rows, source.tokens)),
                "-" if source.epochs is None else f"{source.epochs:.4f}",
                *map(_number, (source.epoch_tokens, source.documents, source.tail_tokens)),
            ]
            for source in self.sources
        ]
        lines = table_lines([columns, *rows])
        if len(self.stages) > 1:
            names = [source.name for source in self.sources if source.rows]
            stages = [
                [f"{stage.first_step:,}", f"{stage.samples:,}"] + [f"{stage.shares.get(name, 0):.2%}" for name in names]
                for stage in self.stages
            ]
            lines += ["", *table_lines([["stage from step", "rows", *names], *stages])]
        return "\n".join(lines)


def _number(value: Optional[int]) -> str:
    return "-" if value is None else f"{value:,}"


def unknown_source(name: str, rows: int, samples: int, sequence_length: int, max_epochs: Optional[float]) -> SourcePlan:
    """What training reads of a source whose data are not here; see source_plan."""
    share, tokens = rows / samples, rows * sequence_length
    return SourcePlan(name, None, None, None, rows, tokens, share, None, max_epochs, None, None, None)


def source_plan(stream, rows: int, samples: int, sequence_length: int, max_epochs: Optional[float]) -> SourcePlan:
    """What training reads of a stream.

    Args:
        stream: A streams.Stream.
        rows: That the run reads of it.
        samples: Of the whole run.
        sequence_length: Tokens in a row.
        max_epochs: Its limit, for the report.
    """
    epoch_tokens, tokens = stream.tokens(0), rows * sequence_length
    begun = max(1, -(-(tokens + 1) // epoch_tokens)) * epoch_tokens if epoch_tokens and rows else 0
    return SourcePlan(
        name=stream.name,
        pairs=len(stream.prefixes),
        documents=stream.documents(0),
        epoch_tokens=epoch_tokens,
        rows=rows,
        tokens=tokens,
        share=rows / samples,
        epochs=tokens / epoch_tokens if epoch_tokens else 0.0,
        max_epochs=max_epochs,
        tail_tokens=begun - (begun - 1) // sequence_length * sequence_length if begun else 0,
        valid_documents=stream.documents(1),
        valid_tokens=stream.tokens(1),
    )


def plan_of_blend(streams: Sequence, weights: Sequence[float], samples: int, sequence_length: int) -> DataPlan:
    """The plan of streams that are blended by weight all the time."""
    rows = apportion(samples, weights)
    sources = [
        source_plan(stream, count, samples, sequence_length, None) for stream, count in zip(streams, rows, strict=True)
    ]
    stage = StagePlan(0, 0, samples, {stream.name: count for stream, count in zip(streams, rows, strict=True)})
    return DataPlan(sequence_length, samples, tuple(sources), (stage,))
