#!/usr/bin/env python3
r"""Iterate an exported model's feedback far beyond the trained passes: does it come to rest, and at what loss?

example:
  python tools/fixed_point.py --model exports/tiny --text held_out.txt --passes 300 --output runs/tiny/fixed_point
  python tools/fixed_point.py --model exports/tiny --data data/corpus --split 95,5,0 --rows 32

Writes fixed_point.json and fixed_point.png. The verdict rests on the gap: loss after the last pass minus loss at the
trained depth. A falling update norm alone proves little, since nearly every trained map contracts.
Exit codes: 0 done, 1 alarm (the update norm grows or the loss is not finite), 2 options, 3 text or data,
4 model folder, 5 the plain pass already has a loss that is not finite.
"""

import argparse
import sys


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="UTF-8 file that the model was not trained on")
    source.add_argument("--data", help="prefix of a data set made by tools/preprocess_data.py")
    parser.add_argument("--split", help="with --data: data.split of the training run; its validation part is taken")
    parser.add_argument("--passes", type=int, default=300, help="default: 300")
    parser.add_argument("--trained_passes", type=int, help="depth to compare with (default: the export's passes)")
    parser.add_argument("--rows", type=int, default=16, help="most rows to take (default: 16)")
    parser.add_argument("--length", type=int, help="tokens in a row (default: as in training)")
    parser.add_argument("--batch", type=int, default=8, help="rows computed together (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="which rows are taken (default: 0)")
    parser.add_argument("--margin", type=float, default=0.1, help="gap that is still good, in nats (default: 0.1)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--output", default=".", help="folder of the results (default: this one)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = vars(parse(argv))
    as_json = options.pop("json")
    from megatron_fbt.analysis.run_fixed_point import FixedPointOptions, measure  # so that --help is instant
    from megatron_fbt.analysis.stability import describe
    from megatron_fbt.data.tool import run_report

    return run_report(lambda: measure(FixedPointOptions(**options)), describe, as_json)


if __name__ == "__main__":
    sys.exit(main())
