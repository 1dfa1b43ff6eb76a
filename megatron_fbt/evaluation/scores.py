"""What the ready task files refer to: from generated texts to scores. A metric is the mean over documents.

A function that scores gets a document and [its samples]: all continuations, as `all_samples` hands them on.
"""

import math
import re
from typing import Any, Callable, Dict, List, Optional, Sequence

from megatron_fbt.errors import DataError
from megatron_fbt.evaluation.answers import last_box, number_after_mark, same_answer
from megatron_fbt.evaluation.sandbox import run_programs


def all_samples(responses: Sequence[Sequence[str]], documents: Sequence[Any]) -> List[List[str]]:
    """A filter that keeps every sample."""
    return [list(samples) for samples in responses]


def gsm8k(document: Dict[str, Any], results: Sequence[Sequence[str]]) -> Dict[str, float]:
    """Share of the samples whose number after #### is the document's."""
    expected = number_after_mark(document["answer"])
    if expected is None:
        raise DataError(f"the answer {document['answer'][-60:]!r} of a GSM8K document has no number after ####")
    found = [number_after_mark(text) for text in results[0]]
    return {"exact_match": _share([number is not None and number[0] == expected[0] for number in found])}


def math_500(document: Dict[str, Any], results: Sequence[Sequence[str]]) -> Dict[str, float]:
    r"""Share of the samples whose last \boxed{} is the document's answer."""
    found = [last_box(text) for text in results[0]]
    return {"exact_match": _share([box is not None and same_answer(box[0], document["answer"]) for box in found])}


def humaneval_runs(responses: Sequence[Sequence[str]], documents: Sequence[Any]) -> List[List[bool]]:
    """A filter that runs HumanEval's tests on each sample: passed or not."""
    return _run_all(responses, documents, humaneval_program)


def mbpp_runs(responses: Sequence[Sequence[str]], documents: Sequence[Any]) -> List[List[bool]]:
    """A filter that runs MBPP's tests on each sample: passed or not."""
    return _run_all(responses, documents, mbpp_program)


def humaneval_program(text: str, document: Dict[str, Any]) -> str:
    """Prompt, continuation, the document's test and its call."""
    return f"{document['prompt']}{text}\n\n{document['test']}\n\ncheck({document['entry_point']})\n"


def mbpp_program(text: str, document: Dict[str, Any]) -> str:
    """Imports and set-up of the document, the code in the continuation, the document's tests."""
    setup = [*document["test_imports"], document["test_setup_code"]]
    return "\n".join([*setup, code_block(text), *document["test_list"], ""])


def code_block(text: str) -> str:
    """The first fenced block of a text; what stands before the closing fence where the prompt has opened it."""
    fenced = re.search(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    fenced = fenced or re.search(r"```[ \t]*\n(.*?)```", text, re.DOTALL)
    return fenced[1] if fenced else text.split("```")[0]


def passed(document: Dict[str, Any], results: Sequence[Sequence[bool]]) -> Dict[str, float]:
    """pass@k for k = 1, 10, 100 as far as there are samples, and for their number."""
    samples = len(results[0])
    right = sum(results[0])
    sizes = sorted({size for size in (1, 10, 100) if size <= samples} | {samples})
    return {f"pass@{size}": pass_at(size, samples, right) for size in sizes}


def pass_at(size: int, samples: int, right: int) -> float:
    """Chance that at least one of `size` samples drawn from the given ones is right: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(samples - right, size) / math.comb(samples, size)


def answer_end(kind: Optional[str], text: str) -> Optional[int]:
    """Where the final answer of a continuation ends, in characters; None = it has none.

    Args:
        kind: The task's metadata `answer`: "number" (after ####), "boxed", or "whole" for all of the text.
        text: A continuation.
    """
    if kind == "whole":
        return len(text)
    finders: Dict[str, Callable[[str], Any]] = {"number": number_after_mark, "boxed": last_box}
    found = finders[kind](text) if kind in finders else None
    return None if found is None else found[1]


def _run_all(
    responses: Sequence[Sequence[str]], documents: Sequence[Any], program: Callable[[str, Dict[str, Any]], str]
) -> List[List[bool]]:
    programs = [program(text, document) for samples, document in zip(responses, documents) for text in samples]
    outcomes = iter(run_programs(programs))
    return [[next(outcomes).passed for _ in samples] for samples in responses]


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)
