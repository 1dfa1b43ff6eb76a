"""Which documents belong to training, validation and test."""

from typing import List, Sequence, Tuple

import numpy


def document_ranges(parts: Sequence[float], documents: int) -> List[Tuple[int, int]]:
    """First and end document of each split, as Megatron-Core rounds them.

    Args:
        parts: Relative sizes of the splits, at least one of them positive.
        documents: Documents of the data set.
    """
    ends = numpy.cumsum(numpy.array(parts, dtype=numpy.float64)) / sum(parts)
    bounds = [0, *(int(round(float(end) * documents)) for end in ends)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
