"""What tools/evaluate.py does: tasks, regimes, results."""

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from megatron_fbt.errors import ConfigError
from megatron_fbt.evaluation.options import EvaluationOptions
from megatron_fbt.evaluation.package import require_lm_eval
from megatron_fbt.evaluation.report import headline
from megatron_fbt.evaluation.scores import answer_end
from megatron_fbt.evaluation.statistics import mean_and_error, paired, quartiles
from megatron_fbt.evaluation.task_files import load_tasks
from megatron_fbt.training.metrics import json_ready, replace_file

Values = Dict[str, Dict[int, float]]
"""{metric: {document: value}}"""


def evaluate(options: EvaluationOptions) -> Dict[str, Any]:
    """Evaluate every task in every regime; writes the output after each, if there is one, and returns the report.

    Raises:
        ConfigError: An option or a task without a meaning, lm-eval is missing, or generated code is not allowed.
        DataError: A task's data cannot be used.
        CheckpointError: No exported model with a tokenizer.
        BadNumbersError: The model's logits are not finite.
    """
    options.validate()
    _check_output(options)
    require_lm_eval()
    tasks = load_tasks(options)
    from megatron_fbt.evaluation.lm import FBTLM, facts

    lm = FBTLM(
        options.model,
        options.regime[0],
        options.fused_passes,
        options.passes,
        options.error_sample,
        options.batch_size,
        options.device,
        options.dtype,
        options.max_length,
        options.seed,
    )
    if options.apply_chat_template and not lm.tokenizer.chat_template:
        raise ConfigError(f"apply_chat_template: the tokenizer of {options.model} has no chat template; leave it out")
    if lm.max_length > (trained := lm.network.config.max_position_embeddings):
        print(f"warning: max_length={lm.max_length}, the model was trained on rows of {trained}", file=sys.stderr)
    report: Dict[str, Any] = {"model": facts(lm), "options": vars(options), "complete": False, "results": []}
    report["comparisons"] = []
    try:
        _measure_all(lm, tasks, options, report)
    except KeyboardInterrupt:
        kept = f"{len(report['results'])} results are in {options.output}" if options.output else "nothing was written"
        print(f"stopped: {kept}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    report["complete"] = True
    _write(options, report)
    return report


def _measure_all(lm: Any, tasks: Dict[str, Any], options: EvaluationOptions, report: Dict[str, Any]) -> None:
    """Every task in every regime, into the report."""
    for name, task in tasks.items():
        first: Optional[Tuple[Dict[str, Any], Values]] = None
        for regime in options.regime:
            result, values = _measure(lm.in_regime(regime), name, task, options)
            report["results"].append(result)
            if first is None:
                first = result, values
            else:
                report["comparisons"].append(_compare(first, (result, values)))
            _write(options, report)
            print(f"done: {headline(result)}", file=sys.stderr, flush=True)


def _check_output(options: EvaluationOptions) -> None:
    """Refuse an output that cannot be written, before the work rather than after it."""
    if options.output is None:
        return
    path = Path(options.output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"output {path}: cannot be written ({error.strerror or error})") from error


def _measure(lm: Any, name: str, task: Any, options: EvaluationOptions) -> Tuple[Dict[str, Any], Values]:
    """One task in one regime: its result, and the value of each metric for each document."""
    from lm_eval import evaluator

    begin = time.perf_counter()
    task.set_fewshot_seed(seed=options.seed)
    try:
        found = evaluator.evaluate(
            lm,
            {"tasks": {name: task}, "groups": {}, "group_map": {}},
            limit=options.limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.apply_chat_template,
            confirm_run_unsafe_code=options.allow_code_execution,
        )
    except (AssertionError, ValueError) as error:  # what lm-eval's samplers raise
        if not any(words in str(error) for words in ("number of fewshot samples", "Sample larger than population")):
            raise
        raise ConfigError(f"num_fewshot={task.get_config('num_fewshot')}: task {name} has fewer ({error})") from error
    samples = found["samples"][name]
    metrics, values = _metrics(found["results"][name], samples)
    result = {
        "task": name,
        "regime": lm.how.regime,
        "documents": len({sample["doc_id"] for sample in samples}),
        "num_fewshot": task.get_config("num_fewshot"),
        "metrics": metrics,
        "seconds": round(time.perf_counter() - begin, 2),
        "cut_requests": lm.cut,
    }
    if lm.errors:
        result["error_of_passes"] = {
            "passes": lm.how.passes,
            "requests": len(lm.errors),
            "max": max(lm.errors),
            "mean": sum(lm.errors) / len(lm.errors),
        }
    if lm.traces:
        result["trace"] = _trace(lm, task, values)
    if options.log_samples:
        _write_samples(options, name, lm, samples)
    return result, values


def _metrics(aggregated: Dict[str, Any], samples: List[Dict[str, Any]]) -> Tuple[Dict[str, Any], Values]:
    """Metrics as lm-eval aggregates them; with a standard error where that is the mean over documents."""
    metrics: Dict[str, Any] = {}
    values: Values = {}
    for key, value in aggregated.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        label = metric if filter_name == "none" else f"{metric} ({filter_name})"
        own = {s["doc_id"]: s[metric] for s in samples if s["filter"] == filter_name and metric in s}
        metrics[label] = {"value": value, "stderr": None, "n": len(own)}
        if own and all(isinstance(entry, (int, float)) for entry in own.values()):
            mean = mean_and_error(list(own.values()))
            if math.isclose(mean["value"], value, rel_tol=1e-9, abs_tol=1e-12):
                metrics[label], values[label] = mean, own
    return metrics, values


def _trace(lm: Any, task: Any, values: Values) -> Dict[str, Any]:
    """Tokens to the end and to the answer of the continuations; their means by document go into `values`."""
    from megatron_fbt.evaluation.decoding import tokens_until

    kind = (task.config.metadata or {}).get("answer")
    ends, answers = [], []
    by_document: Dict[str, Dict[int, List[int]]] = {"tokens to the end": {}, "tokens to the answer": {}}
    for trace in lm.traces:
        one = trace.continuation
        ends.append(len(one.ids))
        by_document["tokens to the end"].setdefault(trace.document, []).append(len(one.ids))
        unfinished = kind == "whole" and one.finish == "length"
        if not unfinished and (end := answer_end(kind, one.text)) is not None:
            answers.append(tokens_until(lm.tokenizer, one.prompt_ids, one.ids, end))
            by_document["tokens to the answer"].setdefault(trace.document, []).append(answers[-1])
    for label, lengths in by_document.items():
        if lengths:
            values[label] = {document: sum(those) / len(those) for document, those in lengths.items()}
    return {
        "continuations": len(ends),
        "tokens_to_end": quartiles(ends),
        "tokens_to_answer": quartiles(answers),
        "cut_at_max_gen_toks": sum(trace.continuation.finish == "length" for trace in lm.traces),
    }


def _compare(base: Tuple[Dict[str, Any], Values], other: Tuple[Dict[str, Any], Values]) -> Dict[str, Any]:
    """Differences of each metric and of the trace lengths, document by document."""
    differences = {
        label: paired(base[1][label], other[1][label])
        for label in [*base[1]]
        if label in other[1] and set(base[1][label]) & set(other[1][label])
    }
    return {
        "task": base[0]["task"],
        "base": base[0]["regime"],
        "regime": other[0]["regime"],
        "differences": differences,
    }


def _write(options: EvaluationOptions, report: Dict[str, Any]) -> None:
    if options.output is not None:
        replace_file(options.output, json.dumps(json_ready(report), indent=1) + "\n")


def _write_samples(options: EvaluationOptions, name: str, lm: Any, samples: List[Dict[str, Any]]) -> None:
    """Everything that was asked and answered, a line for each document."""
    place = Path(options.output).with_suffix("")
    traces: Dict[int, List[Dict[str, Any]]] = {}
    for trace in lm.traces:
        one = trace.continuation
        traces.setdefault(trace.document, []).append({"tokens": len(one.ids), "finish": one.finish, "text": one.text})
    lines = []
    for sample in samples:
        entry = {key: value for key, value in sample.items() if key not in ("doc_hash", "prompt_hash", "target_hash")}
        entry["continuations"] = traces.get(sample["doc_id"], [])
        lines.append(json.dumps(json_ready(entry), default=str, ensure_ascii=False))
    path = place.with_name(f"{place.name}.{name}.{lm.how.regime}.samples.jsonl")
    replace_file(path, "\n".join(lines) + "\n")
