"""Results as lines of text."""

from typing import Any, Dict, List


def result_lines(result: Dict[str, Any]) -> List[str]:
    """One task in one regime."""
    head = f"{result['task']}  {result['regime']}  {result['documents']} documents, {result['seconds']:.1f} s"
    lines = [head]
    for name, metric in result["metrics"].items():
        lines.append(f"  {name:<24} {metric['value']:>10.4f}{_error(metric)}")
    if trace := result.get("trace"):
        for label, name in (("tokens to the answer", "tokens_to_answer"), ("tokens to the end", "tokens_to_end")):
            if parts := trace[name]:
                lines.append(
                    f"  {label:<24} {parts['median']:>10.1f}  median; quartiles {parts['q1']:.1f} and "
                    f"{parts['q3']:.1f}, {parts['n']} of {trace['continuations']} continuations"
                )
        if trace["cut_at_max_gen_toks"]:
            lines.append(f"  {'cut at max_gen_toks':<24} {trace['cut_at_max_gen_toks']:>10}  continuations")
    if error := result.get("error_of_passes"):
        lines.append(
            f"  {'error of the passes':<24} {error['max']:>10.2e}  nats at most, {error['mean']:.2e} on average: "
            f"{error['passes']} passes against the recurrence, {error['requests']} requests"
        )
    if result["cut_requests"]:
        lines.append(f"  {'cut on the left':<24} {result['cut_requests']:>10}  requests longer than max_length")
    return lines


def comparison_lines(comparison: Dict[str, Any]) -> List[str]:
    """One regime against the first one."""
    lines = [f"{comparison['task']}  {comparison['regime']} - {comparison['base']}, document by document"]
    for name, difference in comparison["differences"].items():
        lines.append(f"  {name:<24} {difference['value']:>+10.4f}{_error(difference)}")
    return lines


def _error(metric: Dict[str, Any]) -> str:
    error = "" if metric["stderr"] is None else f" +- {metric['stderr']:.4f}"
    return f"{error}  ({metric['n']} documents)"
