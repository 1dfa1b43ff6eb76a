"""Final answers in generated solutions: found, brought to one form, compared."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Optional, Tuple

NUMBER_AFTER_MARK = re.compile(r"####\s*\$?\s*(-?)\s*\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")
BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\d\-a-zA-Z\\])")

REMOVED = (
    r"\left",
    r"\right",
    "~",
    r"^\circ",
    r"^{\circ}",
    r"\%",
    "%",
    r"\$",
    "$",
    r"\displaystyle",
)
"""What does not change the value of an answer."""


def number_after_mark(text: str) -> Optional[Tuple[Decimal, int]]:
    """The number after the first #### that has one, and where it ends; None = there is none."""
    found = NUMBER_AFTER_MARK.search(text)
    if found is None:
        return None
    return Decimal(found[1] + found[2].replace(",", "")), found.end()


def last_box(text: str) -> Optional[Tuple[str, int]]:
    r"""What the last complete \boxed{} (or \fbox{}) holds, and where it ends; None = there is none."""
    result = None
    for found in BOXES.finditer(text):
        start = found.end()
        if text[start] != "{":  # \boxed 5
            token = re.compile(r"\\[a-zA-Z]+|-?[\w.]+").match(text, start)
            result = (token[0], token.end()) if token else result
            continue
        depth = 0
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if depth == 0:
                result = (text[start + 1 : place], place + 1)
                break
    return result


def normal_form(answer: str) -> str:
    r"""An answer in LaTeX without what does not change its value.

    Spaces, $, %, degrees, \left and \right go; \dfrac and \tfrac become \frac; \frac12 and 1/2 become \frac{1}{2};
    \sqrt2 becomes \sqrt{2}; \text{...} keeps its words where it is the whole answer and goes where it is a unit;
    thousands separators, a full stop at the end and a leading "x =" go; .5 becomes 0.5.
    """
    text = answer.strip().strip("$").strip()
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|mathbf)\{([^{}]*)\}\s*$", _unit_or_word, text)
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\\[ !,;:]", "", text).replace("{,}", ",")
    for part in REMOVED:
        if part.startswith("\\") and part[-1].isalpha():
            text = re.sub(re.escape(part) + r"(?![a-zA-Z])", "", text)
        else:
            text = text.replace(part, "")
    text = re.sub(r"\s+", "", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\neq", r"\ne")
    text = text.replace("bmatrix", "pmatrix")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = text.rstrip(".")
    if re.fullmatch(r"[a-zA-Z]=.+", text):
        text = text[2:]
    return text


def same_answer(given: str, expected: str) -> bool:
    """Whether two answers have the same normal form, or are the same number."""
    forms = normal_form(given), normal_form(expected)
    if forms[0] == forms[1]:
        return True
    numbers = [_number(form) for form in forms]
    return None not in numbers and numbers[0] == numbers[1]


def _unit_or_word(found: re.Match) -> str:
    """The whole answer in \text stays, behind a number it is a unit."""
    return (
        found[1] if found.start() == 0 else "" if re.search(r"[\d})]\s*$", found.string[: found.start()]) else found[1]
    )


def _number(form: str) -> Optional[Fraction]:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", form)
    if fraction and int(fraction[3]):
        value = Fraction(int(fraction[2]), int(fraction[3]))
        return -value if fraction[1] else value
    return Fraction(form) if re.fullmatch(r"-?\d+(\.\d+)?", form) else None
