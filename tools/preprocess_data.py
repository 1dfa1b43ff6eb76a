#!/usr/bin/env python3
r"""Tokenize text into Megatron's indexed data sets (.bin, .idx), in shards with a manifest; check and merge them.

example:
  python tools/preprocess_data.py --input corpus/ "more/*.jsonl.zst" table.parquet --output data/corpus \
      --tokenizer_type sentencepiece --tokenizer_path tokenizer.model --workers 8 --shards 16
  python tools/preprocess_data.py --input sources/ --input_format files --suffix .py .rst .txt \
      --output data/sources --tokenizer_path tokenizer.model
  python tools/preprocess_data.py validate data/corpus.manifest.json
  python tools/preprocess_data.py merge --output data/all data/corpus.manifest.json data/sources

A second call makes only the shards that are missing. Records with empty or blank text are left out and counted; a bad
line is an error unless --skip_bad_lines is given.
Exit codes: 0 done, 2 options, 3 data (validate: a fault was found).
"""

import argparse
import sys

from megatron_fbt.data import corpus_check, corpus_merge
from megatron_fbt.data.encode import EncodeSettings
from megatron_fbt.data.preprocess import PreprocessOptions, preprocess
from megatron_fbt.data.tool import print_report, run_tool


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ".jsonl, .jsonl.gz, .jsonl.zst, .parquet"
    types = ("sentencepiece", "huggingface", "tiktoken")
    parser.add_argument("--input", nargs="+", required=True, help=f"files ({kinds}), folders or quoted patterns")
    parser.add_argument("--output", required=True, help="prefix of the output files; with several keys PREFIX_KEY")
    parser.add_argument("--tokenizer_type", choices=types, default=types[0])
    parser.add_argument("--tokenizer_path", required=True, help=".model file, Hugging Face folder or NAME.tiktoken")
    parser.add_argument("--json_key", nargs="+", default=["text"], help="keys (columns) of the texts, each an output")
    parser.add_argument(
        "--input_format", choices=("jsonl", "files"), default="jsonl", help="files: each file is one document"
    )
    parser.add_argument("--suffix", nargs="+", default=[], help="endings of the files to take from folders")
    parser.add_argument("--exclude", nargs="+", default=[], help="names of folders and files to leave out")
    parser.add_argument("--workers", type=int, default=1, help="processes; the output is the same for any number")
    parser.add_argument("--shards", type=int, default=1, help="pairs of files to write, each of whole input files")
    parser.add_argument("--num_nodes", type=int, default=1, help="calls of this command that share the shards")
    parser.add_argument("--node_rank", type=int, default=0, help="which of these calls this is, from 0")
    parser.add_argument("--overwrite", action="store_true", help="make all shards anew, even with other settings")
    parser.add_argument("--skip_bad_lines", action="store_true", help="leave out and count bad lines")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["validate"]:
        return corpus_check.main(argv[1:])
    if argv[:1] == ["merge"]:
        return corpus_merge.main(argv[1:])
    args = parse(argv)
    settings = EncodeSettings(
        args.tokenizer_type, args.tokenizer_path, tuple(args.json_key), args.input_format, args.skip_bad_lines
    )
    work = (args.workers, args.shards, args.num_nodes, args.node_rank, args.overwrite)
    options = PreprocessOptions(args.input, args.output, settings, args.suffix, args.exclude, *work)
    return run_tool(lambda: print_report(preprocess(options), args.json))


if __name__ == "__main__":
    sys.exit(main())
