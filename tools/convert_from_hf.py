#!/usr/bin/env python3
"""Make a training checkpoint of a Hugging Face folder: an exported FBT, or a Llama, Mistral, Qwen2 or Qwen3.

A stock model gets a fresh feedback path; its ordinary mode gives the logits that it gave before. Start a run with
--checkpoint.init_from OUTPUT. Only safetensors are read, and no code of the folder is executed.

example:
  python tools/convert_from_hf.py --model models/Qwen3-0.6B --output checkpoints/qwen3
  python tools/convert_from_hf.py --model exports/tiny --output checkpoints/tiny

Exit codes: 0 done, 2 options, 3 tokenizer, 4 model folder or output.
"""

import argparse
import json
import sys

from megatron_fbt.data.tool import run_tool


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json and model*.safetensors")
    parser.add_argument("--output", required=True, help="checkpoint folder to make")
    parser.add_argument("--seed", type=int, default=1234, help="of the fresh feedback path's weights (default 1234)")
    parser.add_argument("--fusion", choices=("gate", "concat", "add"), help="variant of the fresh path (default gate)")
    parser.add_argument(
        "--sequence_length", type=int, help="of config.yaml (default: the model's, of a stock one 4096 at most)"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier import in the output folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> None:
    from megatron_fbt.hf.import_hf import import_model  # here, so that --help does not wait for torch

    report = import_model(args.model, args.output, args.seed, args.fusion, args.sequence_length, args.force)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{report['model_type']} {report['source']} -> {report['output']}: {report['parameters']:,} parameters, "
          f"feedback.input_scale {report['input_scale']:.6g}")  # fmt: skip
    print(f"train on with:\n  {report['command']}")


def main(argv=None) -> int:
    args = parse(argv)
    return run_tool(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
