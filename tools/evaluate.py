#!/usr/bin/env python3
"""Evaluate an exported model on tasks of lm-eval, in one or several regimes side by side.

example:
  python tools/evaluate.py --model exports/tiny --tasks gsm8k math_500 --data_dir data/tasks \\
      --regime standard --regime soft --output runs/tiny/evaluation.json
  python tools/evaluate.py --model exports/tiny --tasks humaneval --data_dir data/tasks --allow_code_execution \\
      --samples 20 --temperature 0.8

Ready tasks: gsm8k, math_500, humaneval, mbpp, each on a file of that name (.jsonl) in --data_dir; see
docs/evaluation.md. Nothing is downloaded. The tables go to stdout, progress and warnings to stderr.
exit codes: 0 done, 2 options, tasks, lm-eval missing or code execution not allowed, 3 data, 4 model folder,
5 logits that are not finite
"""

import argparse
import sys


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder made by tools/convert_to_hf.py")
    parser.add_argument("--tasks", required=True, nargs="+", help="names, or paths of lm-eval's .yaml files")
    regimes = ("standard", "soft", "fused", "recurrent")
    parser.add_argument("--regime", action="append", choices=regimes, help="may be repeated (default: soft)")
    parser.add_argument("--data_dir", default=".", help="folder of the ready tasks' data (default: this one)")
    parser.add_argument("--fused_passes", type=int, default=1, help="fused passes over the prompt (default: 1)")
    passes = "parallel passes for log-likelihoods with feedback, or exact: token by token (default: 4)"
    parser.add_argument("--passes", default="4", help=passes)
    sample = "requests computed token by token as well, to tell the error of the passes (default: 16; 0 = none)"
    parser.add_argument("--error_sample", type=int, default=16, help=sample)
    parser.add_argument("--batch_size", type=int, default=8, help="rows computed together (default: 8)")
    parser.add_argument("--limit", type=int, help="only the first N documents of each task")
    parser.add_argument("--num_fewshot", type=int, help="worked examples in the prompt (default: the task's)")
    parser.add_argument("--samples", type=int, default=1, help="continuations a document, for pass@k (default: 1)")
    parser.add_argument("--temperature", type=float, help="0 = greedy (default: the task's)")
    parser.add_argument("--max_gen_toks", type=int, help="most new tokens (default: the task's)")
    parser.add_argument("--max_length", type=int, help="most tokens of a row (default: what the model was trained on)")
    parser.add_argument("--apply_chat_template", action="store_true", help="prompts as the tokenizer's chat messages")
    parser.add_argument("--allow_code_execution", action="store_true", help="run programs that the model writes")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU where there is one)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16, fp16 or auto, as stored (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and worked examples (default: 0)")
    parser.add_argument("--output", metavar="FILE", help="JSON file, rewritten after each task and regime")
    parser.add_argument("--log_samples", action="store_true", help="beside it, a .jsonl file of all continuations")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = vars(parse(argv))
    as_json = options.pop("json")
    options["regime"] = options["regime"] or ["soft"]
    from megatron_fbt.evaluation.package import work_offline  # here, so that --help is instant

    work_offline()
    from megatron_fbt.data.tool import run_report
    from megatron_fbt.evaluation.options import EvaluationOptions
    from megatron_fbt.evaluation.report import describe
    from megatron_fbt.evaluation.run import evaluate

    return run_report(lambda: evaluate(EvaluationOptions(**options)), describe, as_json)


if __name__ == "__main__":
    sys.exit(main())
