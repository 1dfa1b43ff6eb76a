#!/usr/bin/env python3
r"""Linear probes: which facts can be read off what a layer of an exported model reads, with and without feedback?

example:
  python tools/probe_state.py --model exports/tiny --facts facts.jsonl --output runs/tiny/probe
  python tools/probe_state.py --model exports/tiny --facts facts.jsonl --layer 0 2 --regimes plain,fused1,fused3

A line of the facts: {"input_ids": [...] or "text": "...", "labels": [one for each token, null = none], "group": ...}.
A group (default: the line) is never split between fitting and testing. Regimes: plain, fusedN (the plain pass and N
fused ones), recurrent (token by token). Writes probe_state.json and probe_state.png.
Exit codes: 0 done, 2 options, 3 facts, 4 model folder, 5 states that are not finite.
"""

import argparse
import sys


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py")
    parser.add_argument("--facts", required=True, help="labelled sequences (.jsonl)")
    layers = "layers whose input is probed: 0 = the stack's input u_t, number of layers = final norm (default: 0)"
    parser.add_argument("--layer", type=int, nargs="+", default=[0], help=layers)
    parser.add_argument("--regimes", default="plain,fused1,recurrent", help="default: plain,fused1,recurrent")
    parser.add_argument("--folds", type=int, default=5, help="of the cross-validation (default: 5)")
    parser.add_argument("--l2", type=float, default=1.0, help="penalty on the probe's weights (default: 1)")
    parser.add_argument("--max_positions", type=int, default=20000, help="most positions used (default: 20000)")
    parser.add_argument("--batch", type=int, default=8, help="sequences computed together (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of folds and choice of positions (default: 0)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--output", default=".", help="folder of the results (default: this one)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = vars(parse(argv))
    as_json = options.pop("json")
    options["regimes"] = options["regimes"].split(",")
    from megatron_fbt.analysis.run_probe import ProbeOptions, describe, measure  # so that --help is instant
    from megatron_fbt.data.tool import run_report

    return run_report(lambda: measure(ProbeOptions(**options)), describe, as_json)


if __name__ == "__main__":
    sys.exit(main())
