"""Rows and documents as text for a person: marks beside the text, no colour, control characters spelled out."""

import re
from typing import Any, Dict, List, Optional, Sequence

from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.data.tokenizer import Tokenizer

LINE = 100
"""Characters of text on one line."""
PIECE = re.compile(r"\\<[^>]*>|\\x..|\\u.{4}|\\U.{8}|\\.|\w+ ?|.")
"""What a line break does not divide: names of tokens, control characters that are spelled out, words."""
LEGEND = (
    "marks: D a document begins here; L the prediction made here counts in the loss (of the next token, or of the\n"
    "       label shown); F the input is fused with feedback in the pass named; A the assistant writes this token\n"
    r"text:  \n, \t, \x1b, \u200b, ... are control characters, \\ a backslash, \<...> a token that is no text"
)


class Speller:
    """Spells token ids.

    Args:
        tokenizer: That made them; None = ids are shown as numbers.
    """

    def __init__(self, tokenizer: Optional[Tokenizer]):
        self._tokenizer = tokenizer
        self._names: Dict[int, str] = {}
        if tokenizer is not None:
            self._names = {
                token: f"\\<{escaped(name.strip('<>'))}>" for name, token in tokenizer.control_tokens.items()
            }
            self._names.setdefault(tokenizer.eod, r"\<end of document>")

    def __call__(self, ids: Sequence[int]) -> str:
        """Text of ids, on one line."""
        if self._tokenizer is None:
            return " ".join(map(str, ids)) + " "
        parts: List[str] = []
        run: List[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self._names:
                run.append(token)
                continue
            if run:
                parts.append(escaped(self._tokenizer.detokenize(run)))
                run = []
            if token is not None:
                parts.append(self._names[token])
        return "".join(parts)


def escaped(text: str) -> str:
    """The text with everything spelled out that does not print as itself: \\n, \\x1b, \\u202e; a backslash as two."""
    return "".join(
        character
        if character.isprintable() and character != "\\"
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )


def lines_of(text: str) -> List[str]:
    """Lines of at most LINE characters of a spelled text; a line break in it ends one."""
    lines = [""]
    for piece in PIECE.findall(text):
        while lines[-1] and len(lines[-1]) + len(piece) > LINE or len(piece) > LINE:
            room = LINE - len(lines[-1]) if len(piece) > LINE else 0
            lines[-1] += piece[:room]
            piece = piece[room:]
            lines.append("")
        lines[-1] += piece
        if piece == r"\n":
            lines.append("")
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def segments_of(spell: Speller, ids: Sequence[int], marks: Sequence[str], labels: Optional[Sequence[Any]] = None):
    """Stretches of positions with the same marks; a document's beginning ends a stretch.

    Args:
        spell: For the text.
        ids: [n].
        marks: [n], one character for each kind of mark, ``-`` where it does not hold; D stands for itself alone.
        labels: [n] to be shown, or None.

    Returns:
        For each stretch {"position", "marks", "text"} and, with labels, "labels".
    """
    found: List[Dict[str, Any]] = []
    begin = 0
    for position in range(1, len(ids) + 1):
        before = marks[position - 1].replace("D", "-") if position < len(ids) else ""
        if position < len(ids) and marks[position] == before:
            continue
        segment = {"position": begin, "marks": marks[begin], "text": spell(ids[begin:position])}
        if labels is not None:
            segment["labels"] = list(labels[begin:position])
        found.append(segment)
        begin = position
    return found


def segment_lines(segments: Sequence[Dict[str, Any]]) -> List[str]:
    """Lines for a person, with the position and the marks of each stretch in front."""
    lines = []
    for segment in segments:
        front = f"{segment['position']:>7} {segment['marks']} |"
        for text in lines_of(segment["text"]):
            lines.append(f"{front}{text}")
            front = " " * (len(front) - 1) + "|"
        if "labels" in segment:
            shown = " ".join("-" if label is None else str(label) for label in segment["labels"])
            lines += [f"{front[:-1]}  labels: {part}" for part in lines_of(shown)]
    return lines


def row_entry(spell: Speller, batch: MicroBatch, fused, own_labels: bool) -> Dict[str, Any]:
    """What there is to say of one row.

    Args:
        spell: For the text.
        batch: Of this row alone, with everything that the first and the last stage get.
        fused: [1, s] bool, positions that are fused in the pass that is looked at.
        own_labels: The labels are not the next tokens.
    """
    tokens, labels = batch.tokens[0].tolist(), batch.labels[0].tolist()
    loss, starts, fused = batch.loss_mask[0].tolist(), batch.document_starts[0].tolist(), fused[0].tolist()
    marks = [
        ("D" if start else "-") + ("L" if counts else "-") + ("F" if feeds else "-")
        for start, counts, feeds in zip(starts, loss, fused)
    ]
    shown = [label if counts else None for label, counts in zip(labels, loss)] if own_labels else None
    return {
        "documents": sum(starts),
        "loss_tokens": sum(counts > 0 for counts in loss),
        "fused_tokens": sum(fused),
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss,
        "document_starts": starts,
        "fused": fused,
        "segments": segments_of(spell, tokens, marks, shown),
    }
