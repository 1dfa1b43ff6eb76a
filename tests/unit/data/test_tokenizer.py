"""Tokenizers: lossless, deaf to special tokens in text, and equal to their Hugging Face form."""

import io
import json
import pickle
import string

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.errors import ConfigError, DataError

TEXTS = [
    "",
    " ",
    "  two spaces, then  two",
    "\n\n\ttab\r\n line\r",
    "</s><unk><s><pad> </s> <0x0A> <0xE2><0x96><0x81>",
    "<|end|> inside <|end|>",
    "\u2581 \u2581\u2581a \u2581",
    "na\u00efve \u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469 \u0301 \ufb01 \u00a0\u3000\ufeff\ufffd\u2028\x7f\x01",
    " " * 33 + "=" * 41 + "-=" * 9 + "\n" * 17,
    "class A:\n    def f(self):\n\n        return 1234567890\n",
]
ANY_TEXT = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8")),
        st.text(st.sampled_from(" \n\t=-#\"'_" + string.ascii_lowercase)),
        st.sampled_from(["</s>", "<unk>", "<|end|>", "<0x41>", "\u2581", "    ", "return ", "\n\n    "]),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface", "tiktoken"])
def pair(request, sentencepiece_model, huggingface_folder, tiktoken_file, tmp_path_factory):
    """A tokenizer and what transformers loads from its export."""
    from transformers import AutoTokenizer

    paths = {"sentencepiece": sentencepiece_model, "huggingface": huggingface_folder, "tiktoken": tiktoken_file}
    path = paths[request.param]
    tokenizer = build_tokenizer(TokenizerConfig(type=request.param, path=str(path)))
    folder = tmp_path_factory.mktemp("export")
    tokenizer.save_for_huggingface(folder)
    return tokenizer, AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def check(pair, text):
    tokenizer, exported = pair
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids
    assert exported.encode(text) == ids
    assert exported.decode(ids) == text
    assert exported.decode(ids + [tokenizer.eod], skip_special_tokens=True) == text
    assert tokenizer.detokenize(ids + [tokenizer.eod]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_chosen_texts_come_back_and_the_export_agrees(pair, text):
    check(pair, text)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT)
def test_any_text_comes_back_and_the_export_agrees(pair, text):
    check(pair, text)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(2, 599), max_size=30))
def test_any_ids_decode_to_the_same_text_in_the_export(pair, ids):
    tokenizer, exported = pair
    assert tokenizer.detokenize(ids) == exported.decode(ids, skip_special_tokens=True)


def test_sizes_and_end_token_agree_with_the_export(pair):
    tokenizer, exported = pair
    assert exported.eos_token_id == tokenizer.eod
    assert len(exported) == tokenizer.vocab_size
    json.dumps(tokenizer.unique_identifiers)


def test_batches_equal_single_texts(pair):
    tokenizer, _ = pair
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]


def test_what_workers_get_encodes_alike_in_their_place(pair):
    tokenizer, _ = pair
    encoder = pickle.loads(pickle.dumps(tokenizer.text_encoder()))
    ids, lengths = encoder.tokenize_flat(TEXTS)
    expected = tokenizer.tokenize_batch(TEXTS)
    assert ids.tolist() == sum(expected, []) and lengths.tolist() == list(map(len, expected))
    assert (encoder.vocab_size, encoder.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert [part.size for part in encoder.tokenize_flat([])] == [0, 0]


def test_whole_sources_come_back_and_the_export_agrees(pair, source_folder):
    for path in source_folder.iterdir():
        check(pair, path.read_text("utf-8"))


def test_an_export_can_be_saved_and_loaded_again(pair, tmp_path):
    from transformers import AutoTokenizer

    tokenizer, exported = pair
    exported.save_pretrained(str(tmp_path))
    again = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert [again.encode(text) for text in TEXTS] == tokenizer.tokenize_batch(TEXTS)


def train_spm(**options):
    model = io.BytesIO()
    text = ["hello world and more words", "some other words here"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, minloglevel=2, num_threads=1, **options
    )
    return model.getvalue()


def test_a_model_without_end_token_is_refused_on_use(tmp_path):
    path = tmp_path / "noend.model"
    path.write_bytes(train_spm(vocab_size=20, eos_id=-1, bos_id=-1))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)))
    with pytest.raises(DataError, match="no end-of-sentence token"):
        tokenizer.eod  # noqa: B018


def test_a_huggingface_folder_without_eos_token_is_refused_on_use(huggingface_folder, tmp_path):
    content = (huggingface_folder / "tokenizer.json").read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", path=str(tmp_path)))
    with pytest.raises(DataError, match="no eos_token"):
        tokenizer.eod  # noqa: B018


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_foreign_models_work_but_are_not_exported_wrongly(tmp_path, model_type):
    path = tmp_path / "foreign.model"
    path.write_bytes(train_spm(vocab_size=22, model_type=model_type))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.tokenize("hello  words") == reference.encode("hello  words")
    assert tokenizer.detokenize(tokenizer.tokenize("hello words")) == "hello words"
    with pytest.raises(DataError, match="without normalization"):
        tokenizer.save_for_huggingface(tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
def test_missing_and_broken_files_are_named(tmp_path, kind):
    with pytest.raises(ConfigError, match="data.tokenizer.path"):
        build_tokenizer(TokenizerConfig(type=kind, path=None))
    with pytest.raises(DataError, match="nowhere"):
        build_tokenizer(TokenizerConfig(type=kind, path=str(tmp_path / "nowhere")))
    broken = tmp_path / "broken"
    if kind == "huggingface":
        broken.mkdir()
    else:
        broken.write_bytes(b"not a model")
    with pytest.raises(DataError, match="broken"):
        build_tokenizer(TokenizerConfig(type=kind, path=str(broken)))


def test_an_empty_file_is_no_tokenizer(tmp_path):
    (tmp_path / "t.model").write_bytes(b"")
    with pytest.raises(DataError, match="t.model: it is empty, not a SentencePiece model"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path / "t.model")))
