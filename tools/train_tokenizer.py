#!/usr/bin/env python3
r"""Train a lossless SentencePiece tokenizer: each text decodes back to itself.

example:
  python tools/train_tokenizer.py --input corpus/ --vocab_size 32000 --output data/tokenizer
  python tools/train_tokenizer.py --input sources/ --input_format files --suffix .py .rst .txt \
      --vocab_size 8000 --output data/tokenizer

Writes PREFIX.model and PREFIX.vocab. Equal input and seed give an equal model. Bad lines are left out.
Exit codes: 0 done, 2 options, 3 data.
"""

import argparse
import sys

from megatron_fbt.data.tokenizer_training import TokenizerTraining, train_tokenizer
from megatron_fbt.data.tool import print_report, run_tool


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, help="files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) or folders"
    )
    parser.add_argument("--output", required=True, help="prefix of the output files")
    parser.add_argument("--vocab_size", type=int, default=8000, help="number of token ids (default 8000)")
    parser.add_argument(
        "--sample_sentences", type=int, default=50_000, help="pieces of 8 lines to train on, drawn at random"
    )
    parser.add_argument(
        "--input_format", choices=("jsonl", "files"), default="jsonl", help="files: each file is one document"
    )
    parser.add_argument("--json_key", default="text", help="key of the text")
    parser.add_argument("--suffix", nargs="+", default=[], help="endings of the files to take from folders")
    parser.add_argument("--exclude", nargs="+", default=[], help="names of folders and files to leave out")
    parser.add_argument("--seed", type=int, default=1234, help="of the draw")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse(argv)
    training = TokenizerTraining(
        inputs=args.input,
        output=args.output,
        vocab_size=args.vocab_size,
        sample_sentences=args.sample_sentences,
        input_format=args.input_format,
        json_key=args.json_key,
        suffixes=args.suffix,
        exclude=args.exclude,
        seed=args.seed,
    )
    return run_tool(lambda: print_report(train_tokenizer(training), args.json))


if __name__ == "__main__":
    sys.exit(main())
