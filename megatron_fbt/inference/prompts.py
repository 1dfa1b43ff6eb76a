"""Where prompts come from: options, files, standard input, conversations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, TextIO, Tuple, Union

from megatron_fbt.data.chat import ASSISTANT, ChatEncoder
from megatron_fbt.data.input_files import JSONL_SUFFIXES, InputFile
from megatron_fbt.data.inputs import BadRecord, check_text, parse_object, read_lines
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from megatron_fbt.errors import CheckpointError, ConfigError, DataError

Content = Union[str, List[Dict[str, Any]]]
"""A text, or the messages of a conversation."""


@dataclass(frozen=True)
class Prompt:
    """What to continue.

    Attributes:
        content: As the user gave it.
        ids: Its tokens.
    """

    content: Content
    ids: List[int]


@dataclass
class PromptSource:
    """Where a command's prompts come from; without any, standard input is one prompt.

    Attributes:
        texts: Given on the command line.
        file: A UTF-8 file that is one prompt.
        list_file: A file of prompts: JSON Lines (.jsonl, also .gz and .zst), or one prompt a line.
        key: Where a JSON line has its prompt.
        chat: Prompts are conversations: "messages" of a JSON line, or a text as the user's only message.
    """

    texts: Optional[List[str]] = None
    file: Optional[str] = None
    list_file: Optional[str] = None
    key: str = "prompt"
    chat: bool = False
    origins: List[str] = field(default_factory=list)

    def read(self, stdin: TextIO) -> List[Content]:
        """The prompts in order.

        Raises:
            ConfigError: There is none, one is empty, or a file cannot be read; the message says where.
        """
        try:
            found = self._read(stdin)
        except (OSError, DataError) as error:
            what = "prompt" if self.list_file is None else "prompts"
            raise ConfigError(f"the {what} cannot be read: {error}") from error
        if not found:
            raise ConfigError(f"prompts {self.list_file}: the file is empty; give at least one prompt")
        contents = []
        for origin, content in found:
            try:
                contents.append(self._checked(content))
            except BadRecord as error:
                raise ConfigError(f"{origin}: {error}") from error
        self.origins = [origin for origin, _ in found]
        return contents

    def _read(self, stdin: TextIO) -> List[Tuple[str, Any]]:
        """Each prompt with what names it in a message."""
        if self.texts is not None:
            return [(f"--prompt number {number}", text) for number, text in enumerate(self.texts, 1)]
        if self.file is not None:
            origin = f"--prompt_file {self.file}"
            return [(origin, _decoded(lambda: Path(self.file).read_text(encoding="utf-8"), origin))]
        if self.list_file is None:
            return [("standard input", _decoded(stdin.read, "standard input"))]
        path, found = Path(self.list_file), []
        for number, (line, _) in enumerate(read_lines(InputFile(str(path), path.stat().st_size)), 1):
            origin = f"--prompts {path}, line {number}"
            is_json = path.name.endswith(JSONL_SUFFIXES)
            found.append((origin, self._of_line(line, origin) if is_json else _text(line, origin)))
        return found

    def _of_line(self, line: bytes, origin: str) -> Any:
        key = "messages" if self.chat else self.key
        try:
            record = parse_object(line if line.endswith(b"\n") else line + b"\n")
        except BadRecord as error:
            raise ConfigError(f"{origin}: {error}") from error
        if key not in record:
            raise ConfigError(f"{origin}: the object has no key {key!r}; its keys are {', '.join(map(repr, record))}")
        return record[key]

    def _checked(self, content: Any) -> Content:
        if self.chat and isinstance(content, list):
            whole = content and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in content)
            if not whole:
                raise BadRecord("messages", "messages must be a list of objects with role and content")
            if content[-1]["role"] == ASSISTANT:
                raise BadRecord("answered", "the conversation ends with the assistant's message; leave that out")
            for number, message in enumerate(content, 1):
                if message["role"] == "user" and not isinstance(message.get("content"), (str, list)):
                    raise BadRecord("messages", f"message {number}: the user's content is missing or no text")
            _check_texts(content)
            return content
        if not isinstance(content, str):
            raise BadRecord("not_a_text", f"the prompt is a {type(content).__name__}, not a text")
        if not content:
            raise BadRecord("empty", "the prompt is empty; give at least one token")
        check_text(content)
        return [{"role": "user", "content": content}] if self.chat else content


def _check_texts(value: Any) -> None:
    """Every text in a JSON value; see check_text."""
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, (list, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            _check_texts(entry)


def _text(line: bytes, origin: str) -> str:
    return _decoded(lambda: line.decode("utf-8"), origin).removesuffix("\n").removesuffix("\r")


def _decoded(read: Callable[[], str], origin: str) -> str:
    """What `read` gives; bytes that are no text are told with their place."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8: {error.reason} at byte {error.start + 1}; save it as UTF-8") from error


def encode_prompts(contents: List[Content], tokenizer: Any, folder: str, source: PromptSource) -> List[Prompt]:
    """Tokens of all prompts, none of them empty; nothing is added to a text.

    Args:
        contents: From PromptSource.read.
        tokenizer: From load_tokenizer.
        folder: Of the exported model, whose chat template renders conversations.
        source: Where they come from.

    Raises:
        ConfigError: A prompt has no token, or the template refuses it.
        CheckpointError: The export has no chat template.
    """
    encode = _chat_encoder(folder) if source.chat else lambda text: tokenizer(text, add_special_tokens=False).input_ids
    prompts = []
    for origin, content in zip(source.origins, contents, strict=True):
        try:
            ids = encode(content)
        except BadRecord as error:
            raise ConfigError(f"{origin}: {error}") from error
        if not ids:
            raise ConfigError(f"{origin}: the prompt is empty: give at least one token")
        prompts.append(Prompt(content, list(ids)))
    return prompts


def _chat_encoder(folder: str) -> Any:
    """Messages to ids; what a message says cannot become a control token."""
    tokenizer = HuggingFaceTokenizer(folder)
    template = tokenizer.chat_template
    if template is None:
        raise CheckpointError(f"model {folder}: has no chat template, it was not trained on conversations; omit --chat")
    return ChatEncoder(template, tokenizer).encode_prompt
