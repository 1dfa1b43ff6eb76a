"""Chat templates: the assistant's tokens are found for every kind of template, and text stays text."""

import pytest

from megatron_fbt.config.data import DataConfig, TokenizerConfig
from megatron_fbt.data.chat import PLAIN_TEMPLATE, ChatEncoder, chat_template
from megatron_fbt.data.inputs import BadRecord
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron_fbt.errors import DataError
from tests.unit.data.chats import TAGGED, TEMPLATE, chat, spell, write_letter_tokenizer

TURNS = chat("system: be", "user: ab", "assistant: cd", "user: e", "assistant: ")


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return HuggingFaceTokenizer(write_letter_tokenizer(tmp_path_factory.mktemp("letters")))


def shown(ids, mask):
    return spell(ids), "".join("1" if generated else "." for generated in mask)


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED], ids=["prefixes", "tags"])
def test_content_and_end_of_turn_are_the_assistants(letters, template):
    text, mask = shown(*ChatEncoder(template, letters).encode(TURNS))
    assert (text, mask) == (
        "SbeE/UabE/AcdE/UeE/AE/",
        "...........111......1.",
    )


def test_a_prompt_has_the_tokens_that_it_has_when_the_model_decodes(letters):
    ids, mask = ChatEncoder(TEMPLATE, letters).encode(TURNS)
    prompt = letters._tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, tokenize=False)
    assert letters.encode_rendered(prompt) == ids[: mask.argmax()].tolist()


def test_control_tokens_in_a_message_are_text(letters):
    turns = chat("user: a<|end|>b<|assistant|>", "assistant: c<|end|>")
    text, mask = shown(*ChatEncoder(TEMPLATE, letters).encode(turns))
    assert text == "Ua<|end|>b<|assistant|>E/Ac<|end|>E/"
    assert mask == "." * 26 + "1" * 9 + "."


def test_a_turn_without_control_token_goes_to_its_end(letters):
    template = "{% for m in messages %}{{ m['role'][0] + '|' + m['content'] + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'a|' }}{% endif %}"
    text, mask = shown(*ChatEncoder(template, letters).encode(chat("user: x", "assistant: yz")))
    assert (text, mask) == ("u|x/a|yz/", "......111")


def test_a_template_that_closes_every_conversation_is_understood(letters):
    closing = TEMPLATE + "{% if not add_generation_prompt %}{{ '<|system|>' }}{% endif %}"
    text, mask = shown(*ChatEncoder(closing, letters).encode(TURNS))
    assert (text, mask) == ("SbeE/UabE/AcdE/UeE/AE/S", "...........111......111")


@pytest.mark.parametrize("first", ["\n\nhello", " hello", "hello", "\u00e9", ""])
@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_prompt_and_reply_never_share_a_token(kind, first, sentencepiece_model, huggingface_folder):
    path = {"sentencepiece": sentencepiece_model, "huggingface": huggingface_folder}[kind]
    tokenizer = build_tokenizer(TokenizerConfig(type=kind, path=str(path)))
    template = chat_template(DataConfig(), tokenizer)
    assert template == PLAIN_TEMPLATE
    ids, mask = ChatEncoder(template, tokenizer).encode(chat("user: return x ", f"assistant: {first}"))
    prompt = "### User:\nreturn x \n\n### Assistant:\n"
    assert ids[~mask].tolist() == tokenizer.tokenize(prompt)
    assert ids[mask].tolist() == [*tokenizer.tokenize(first), tokenizer.eod]


def test_a_tokenizer_that_writes_a_blank_first_keeps_the_whole_texts_tokens(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["?", "\u2581u", "\u2581a", "\u2581", "u", "a", ":", "x", "y", "<end>"]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("\u2581", "u"), ("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(str(tmp_path))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    template = "{% for m in messages %}{{ ' ' + m['role'][0] + ':' + m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ ' a:' }}{% endif %}"
    ids, mask = ChatEncoder(template, tokenizer).encode(chat("user: x", "assistant: y"))
    found = [(pieces[i], bool(m)) for i, m in zip(ids, mask, strict=True)]
    assert found[-3:] == [("\u2581a", False), (":", False), ("y", True)] and [p for p, _ in found].count("\u2581") <= 1
    with pytest.raises(BadRecord, match="meet inside of a token near"):
        ChatEncoder(template.replace("' a:'", "' '").replace("':'", "''"), tokenizer).encode(chat("assistant: a"))


STRIPPING = TEMPLATE.replace("message['content']", "(message['content'] if loop.last else message['content'][-1])")
"""Leaves reasoning out of earlier turns."""
NOT_ADDITIVE = "{% for m in messages %}{{ '%d' | format(messages | length) + m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (STRIPPING, chat("user: a", "assistant: x|b", "user: c", "assistant: d"), "does not render message 2"),
        (NOT_ADDITIVE, chat("user: a", "assistant: b", "user: c"), "does not render message 2 .* data.chat_template"),
        ("{{ raise_exception('roles must alternate') }}", chat("user: a", "assistant: b"), "roles must alternate"),
        ("{{ messages[0]['content'] }}", chat("assistant: b"), "data.chat_template. fails"),
        ("{% for", chat("user: a"), "data.chat_template. fails: TemplateSyntaxError"),
        (TEMPLATE, chat("user: a\ufdd0"), "U\\+FDD0"),
        (TEMPLATE, chat("user<|end|>: a"), "the role 'user<|end|>' holds the name of a control token"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(letters, template, turns, reason):
    with pytest.raises(BadRecord, match=reason.replace("<|", r"<\|").replace("|>", r"\|>")):
        ChatEncoder(template, letters).encode(turns)


def test_the_template_comes_from_the_file_then_the_tokenizer_then_the_plain_one(tmp_path, letters):
    bare = HuggingFaceTokenizer(write_letter_tokenizer(tmp_path / "bare", template=None))
    assert chat_template(DataConfig(), letters) == TEMPLATE and chat_template(DataConfig(), bare) == PLAIN_TEMPLATE
    (tmp_path / "chat.jinja").write_text("{{ 1 }}")
    config = DataConfig(format="conversations", chat_template=str(tmp_path / "chat.jinja"))
    assert chat_template(config, letters) == "{{ 1 }}"
    config.chat_template = str(tmp_path / "nowhere.jinja")
    with pytest.raises(DataError, match=r"data\.chat_template = .*nowhere\.jinja.*cannot be read"):
        chat_template(config, letters)


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_an_exported_tokenizer_renders_the_prompts_of_the_training(kind, tmp_path, sentencepiece_model):
    from transformers import AutoTokenizer

    path = sentencepiece_model if kind == "sentencepiece" else write_letter_tokenizer(tmp_path / "letters")
    tokenizer = build_tokenizer(TokenizerConfig(type=kind, path=str(path)))
    turns = chat("user: ab c", "assistant: d", "user: e")
    template = chat_template(DataConfig(), tokenizer)
    tokenizer.saved_chat_template = template
    tokenizer.save_for_huggingface(tmp_path / "export")
    exported = AutoTokenizer.from_pretrained(str(tmp_path / "export"), local_files_only=True)
    ids, mask = ChatEncoder(template, tokenizer).encode([*turns, {"role": "assistant", "content": "f"}])
    prompt = exported.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    last_turn = max(i for i in range(1, len(mask)) if mask[i] and not mask[i - 1])
    assert exported.encode(prompt, add_special_tokens=False) == ids[:last_turn].tolist()
    assert prompt.count("ab c") == 1 and prompt == exported.decode(ids[:last_turn])
