#!/usr/bin/env python3
"""Unigram entropy of indexed data sets: the loss, in nats per token, of a model that knows token frequencies only.

example:
  python tools/corpus_entropy.py data/corpus
  python tools/corpus_entropy.py data/code data/text --json

Exit codes: 0 done, 2 options, 3 data.
"""

import argparse
import sys

import numpy

from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.tool import print_report, run_tool


def count_tokens(prefixes) -> numpy.ndarray:
    """How often each token id occurs in all the data sets together."""
    counts = numpy.zeros(0, dtype=numpy.int64)
    for prefix in prefixes:
        dataset = open_indexed(prefix)
        for number in range(len(dataset)):
            found = numpy.bincount(dataset[number], minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
    return counts


def unigram_entropy(counts: numpy.ndarray) -> float:
    """-sum p ln p, in nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * numpy.log(shares)).sum())


def report(prefixes) -> dict:
    counts = count_tokens(prefixes)
    return {
        "tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "unigram_entropy": round(unigram_entropy(counts), 4),
    }


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="+", help="path of a data set without .bin and .idx")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    args = parser.parse_args(argv)
    return run_tool(lambda: print_report(report(args.prefix), args.json))


if __name__ == "__main__":
    sys.exit(main())
