"""Conversations to token ids by a chat template, with the assistant's tokens marked.

Names of control tokens inside a message are text: only the template can write a control token.
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy

from megatron_fbt.config.data import DataConfig
from megatron_fbt.data.inputs import BadRecord
from megatron_fbt.data.tokenizer import Tokenizer
from megatron_fbt.errors import DataError

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
"""Used where neither the tokenizer nor the configuration has a template; an assistant's turn ends with eos_token."""
ASSISTANT = "assistant"
"""Role whose turns the loss lies on."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Stand around the name of a control token in a message; noncharacters, which no text holds."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_template(config: DataConfig, tokenizer: Tokenizer) -> str:
    """The template that renders the conversations of a run.

    Raises:
        DataError: data.chat_template cannot be read.
    """
    if config.chat_template is None:
        return tokenizer.chat_template or PLAIN_TEMPLATE
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template = {config.chat_template!r}: cannot be read: {error}") from error


class ChatEncoder:
    """Encodes conversations with one template and one tokenizer.

    Args:
        template: Jinja text, as transformers' chat templates are. With {% generation %} blocks these are the
            assistant's turns; without, a turn is what the template adds to the messages before it and the generation
            prompt, up to and with the last control token (the end of the turn).
        tokenizer: its control tokens are those that the template may write.
    """

    def __init__(self, template: str, tokenizer: Tokenizer):
        self._template, self._tokenizer = template, tokenizer
        self._variables = tokenizer.template_variables
        self._has_tags = _GENERATION_TAG.search(template) is not None
        names = "|".join(re.escape(name) for name in sorted(tokenizer.control_tokens, key=len, reverse=True))
        control = names or "(?!)"
        self._control = re.compile(control)
        self._marks = re.compile(f"{_OPEN}({control}){_CLOSE}|[{_OPEN}{_CLOSE}]")
        self._control_of_template = re.compile(f"{_OPEN}(?:{control}){_CLOSE}|({control})")

    def encode(self, messages: Sequence[Dict[str, Any]]) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """Token ids [n] int64 of a conversation, and [n] bool, true for the tokens that the assistant generates.

        The tokens up to an assistant's turn are those that the rendered prompt has by itself, as in decoding.

        Args:
            messages: {"role": ..., "content": ...} each; other keys are handed to the template as they are.

        Raises:
            BadRecord: The template refuses the conversation, or the assistant's tokens cannot be told from the others.
        """
        text, spans = self._render_with_turns([self._mark(message) for message in messages])
        cuts = sorted({0, len(text), *itertools.chain.from_iterable(spans)})
        pieces = [self._ids(text[a:b]) for a, b in itertools.pairwise(cuts)]
        whole = self._ids(text)
        joined = list(itertools.chain.from_iterable(pieces))
        if joined != whole and self._tokenizer.detokenize(joined) != self._tokenizer.detokenize(whole):
            joined, pieces = whole, self._cut(whole, text, cuts)
        turns = {begin for begin, _ in spans}
        mask = [
            numpy.full(len(piece), begin in turns, dtype=bool) for begin, piece in zip(cuts[:-1], pieces, strict=True)
        ]
        return numpy.array(joined, dtype=numpy.int64), numpy.concatenate([numpy.zeros(0, dtype=bool), *mask])

    def encode_prompt(self, messages: Sequence[Dict[str, Any]]) -> List[int]:
        """Token ids of a conversation and of what the template writes before the assistant's next turn.

        Raises:
            BadRecord: The template refuses the conversation.
        """
        marked = [self._mark(message) for message in messages]
        return self._ids(self._render(marked, add_generation_prompt=True)[0])

    def _cut(self, whole: List[int], text: str, cuts: List[int]) -> List[List[int]]:
        """The tokens of the text between the cuts, for tokenizers that add something to the begin of each text."""
        ends = [0]
        for cut in cuts[1:]:
            prefix = self._ids(text[:cut])
            if whole[: len(prefix)] != prefix:
                shown = text[max(cut - 20, 0) : cut + 20]
                raise BadRecord(
                    "turns_share_a_token",
                    f"prompt and reply meet inside of a token near {shown!r}; use a chat template (data.chat_template) "
                    "with a control token or a line end there",
                )
            ends.append(len(prefix))
        return [whole[a:b] for a, b in itertools.pairwise(ends)]

    def _mark(self, value: Any, key: Optional[str] = None) -> Any:
        """A message with marks around the names of control tokens in its texts."""
        if isinstance(value, dict):
            return {name: self._mark(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item) for item in value]
        if key == "role" and isinstance(value, str) and self._control.search(value):
            raise BadRecord("control_token_in_role", f"the role {value!r} holds the name of a control token")
        if not isinstance(value, str) or key == "role":
            return value
        if _OPEN in value or _CLOSE in value:
            raise BadRecord("noncharacter", "a message holds U+FDD0 or U+FDD1, which are no characters")
        return self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)

    def _ids(self, text: str) -> List[int]:
        """Token ids of rendered text; marked names of control tokens are encoded as text."""
        ids: List[int] = []
        for position, part in enumerate(self._marks.split(text)):
            if part:
                encode = self._tokenizer.tokenize if position % 2 else self._tokenizer.encode_rendered
                ids += encode(part)
        return ids

    def _render_with_turns(self, messages: List[Dict[str, Any]]) -> Tuple[str, List[Tuple[int, int]]]:
        """Rendered text, and begin and end of each of the assistant's turns in it."""
        if self._has_tags:
            text, spans = self._render(messages, return_assistant_tokens_mask=True)
            return text, [(begin, end) for begin, end in spans if begin < end]
        text, spans = self._render(messages)[0], []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], add_generation_prompt=True)[0]
            after = self._render(messages[: number + 1])[0]
            end = self._shared(after, text)
            # Some templates close the conversation with a control token, wherever it ends.
            closed = not self._control.sub("", after[end:]).strip()
            if not (text.startswith(before) and after.startswith(before) and len(before) <= end and closed):
                raise BadRecord(
                    "template_not_additive",
                    f"the chat template does not render message {number + 1} (the assistant's) as an addition to the "
                    "generation prompt, so its tokens cannot be told from the others; name a template with "
                    "{% generation %} blocks around the assistant's turns in data.chat_template",
                )
            spans.append((len(before), self._end_of_turn(text, len(before), end)))
        return text, [(begin, end) for begin, end in spans if begin < end]

    def _shared(self, first: str, second: str) -> int:
        """Length of what two rendered texts begin with, whole control tokens only."""
        length = len(os.path.commonprefix([first, second]))
        for text in (first, second):
            for match in self._control_of_template.finditer(text):
                if match.start() < length < match.end():
                    length = match.start()
        return length

    def _end_of_turn(self, text: str, begin: int, end: int) -> int:
        """Where a turn ends: behind its last control token, if nothing but blanks follows it."""
        found = [match.end(1) for match in self._control_of_template.finditer(text, begin, end) if match.group(1)]
        return found[-1] if found and not text[found[-1] : end].strip() else end

    def _render(self, messages: List[Dict[str, Any]], **options: Any) -> Tuple[str, List[Tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template([messages], chat_template=self._template, **options, **self._variables)
        except Exception as error:  # whatever a template raises
            reason = " ".join(str(error).split())[:300]
            raise BadRecord(
                "refused_by_template",
                f"the chat template (the tokenizer's, or data.chat_template) fails: {type(error).__name__}: {reason}",
            ) from error
        return texts[0], list(spans[0]) if spans else []
