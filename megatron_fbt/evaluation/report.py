"""Results as tables: a task each, its regimes side by side."""

from typing import Any, Callable, Dict, List, Optional

WIDTH = 24
"""Characters of a column."""
Result = Dict[str, Any]


def headline(result: Result) -> str:
    """One task in one regime, in one line."""
    metrics = ", ".join(f"{name} {metric['value']:.4f}" for name, metric in result["metrics"].items())
    return (
        f"{result['task']}, {result['regime']}: {metrics} ({result['documents']} documents, {result['seconds']:.1f} s)"
    )


def describe(report: Dict[str, Any]) -> str:
    """Tables of all tasks, for a person."""
    tables = []
    for name in dict.fromkeys(result["task"] for result in report["results"]):
        results = [result for result in report["results"] if result["task"] == name]
        comparisons = [one for one in report["comparisons"] if one["task"] == name]
        tables.append("\n".join(task_table(results, comparisons)))
    return "\n\n".join(tables)


def task_table(results: List[Result], comparisons: List[Dict[str, Any]]) -> List[str]:
    """A row for each metric, a column for each regime and for each difference to the first one."""
    first = results[0]
    heads = [result["regime"] for result in results]
    heads += [f"{one['regime']} - {one['base']}" for one in comparisons]
    lines = [_line(f"{first['task']}, {first['documents']} documents", heads)]
    for label in dict.fromkeys(label for result in results for label in result["metrics"]):
        cells = [_with_error(result["metrics"].get(label), "") for result in results]
        lines.append(_line(label, cells + [_with_error(one["differences"].get(label), "+") for one in comparisons]))
    for label, name in (("tokens to the answer", "tokens_to_answer"), ("tokens to the end", "tokens_to_end")):
        parts = [result.get("trace", {}).get(name) for result in results]
        if any(parts):
            differences = [_with_error(one["differences"].get(label), "+") for one in comparisons]
            lines.append(_line(f"{label}, mean", [_with_error(_mean(part), "") for part in parts] + differences))
            lines.append(_line("  median", [part and f"{part['median']:.1f}" for part in parts]))
            lines.append(_line("  quartiles", [part and f"{part['q1']:.1f} and {part['q3']:.1f}" for part in parts]))
            lines.append(_line("  of continuations", [part and str(part["n"]) for part in parts]))
    extra: Dict[str, Callable[[Result], Optional[str]]] = {
        "cut at max_gen_toks": lambda result: _count(result.get("trace", {}).get("cut_at_max_gen_toks")),
        "requests cut on the left": lambda result: _count(result["cut_requests"]),
        "error of the passes, max": lambda result: _nats(result, "max"),
        "  mean": lambda result: _nats(result, "mean"),
        "  passes, requests": lambda result: (
            (
                "error_of_passes" in result
                and f"{result['error_of_passes']['passes']}, {result['error_of_passes']['requests']}"
            )
            or None
        ),
        "seconds": lambda result: f"{result['seconds']:.1f}",
    }
    for label, cell in extra.items():
        cells = [cell(result) for result in results]
        if any(cells):
            lines.append(_line(label, cells))
    return lines


def _line(label: str, cells: List[Optional[str]]) -> str:
    return f"{label:<28}" + "".join(f"{cell or '':>{WIDTH}}" for cell in cells).rstrip()


def _with_error(metric: Optional[Dict[str, Any]], sign: str) -> Optional[str]:
    if metric is None:
        return None
    error = "" if metric["stderr"] is None else f" +- {metric['stderr']:.4f}"
    return f"{metric['value']:{sign}.4f}{error}"


def _mean(part: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    return part and {"value": part["mean"], "stderr": None}


def _count(number: Optional[int]) -> Optional[str]:
    return str(number) if number else None


def _nats(result: Result, name: str) -> Optional[str]:
    return f"{result['error_of_passes'][name]:.2e} nats" if "error_of_passes" in result else None
