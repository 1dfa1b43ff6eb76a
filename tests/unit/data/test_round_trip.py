"""Any corpus comes back from its .bin and .idx, whatever the tokenizer, the kind of file and the number of shards."""

import gzip
import json
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fbt.data.corpus_check import validate
from megatron_fbt.data.corpus_manifest import read_manifest
from megatron_fbt.data.encode import EncodeSettings
from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.preprocess import PreprocessOptions, preprocess

TEXT = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
    st.sampled_from(["", " \n\t", "</s>", "<|end|>", "\u2581 \u2581", "\u2028", "a" * 300, '"\\u0041\\n"', "\r\n"]),
)
FILES = st.lists(
    st.tuples(st.lists(TEXT, max_size=6), st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])),
    min_size=1,
    max_size=4,
)


def write(path, texts, ascii_only):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), path)
        return
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=ascii_only).encode() + b"\n" for text in texts)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(pack(lines))


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
def test_any_corpus_comes_back(kind, sentencepiece_model, huggingface_folder, tiktoken_file, monkeypatch):
    paths = {"sentencepiece": sentencepiece_model, "huggingface": huggingface_folder, "tiktoken": tiktoken_file}
    encode = EncodeSettings(kind, str(paths[kind]))
    tokenizer = encode.build_tokenizer()
    monkeypatch.setattr(EncodeSettings, "build_tokenizer", lambda _: tokenizer)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(files=FILES, shards=st.integers(1, 4), chunk=st.sampled_from([1, 64, 1 << 18]), ascii_only=st.booleans())
    def check(files, shards, chunk, ascii_only):
        texts = [text for part, _ in files for text in part if text.strip()]
        if not texts:
            return
        monkeypatch.setattr("megatron_fbt.data.chunks.CHUNK_BYTES", chunk)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "in").mkdir()
            for i, (part, ending) in enumerate(files):
                write(folder / "in" / f"{i}{ending}", part, ascii_only)
            output = str(folder / "x")
            preprocess(PreprocessOptions([str(folder / "in")], output, encode, shards=min(shards, len(files))))
            manifest = read_manifest(f"{output}.manifest.json")
            documents = []
            for prefix in manifest.prefixes:
                data = open_indexed(prefix, False, tokenizer.vocab_size)
                documents += [data[i].tolist() for i in range(len(data))]
            assert [tokenizer.detokenize(ids) for ids in documents] == texts
            assert all(ids.count(tokenizer.eod) == 1 and ids[-1] == tokenizer.eod for ids in documents)
            assert manifest.tokens == sum(map(len, documents)) and validate([manifest.path])["faults"] == []
            assert manifest.skipped.get("empty_text", 0) == sum(len(part) for part, _ in files) - len(texts)

    check()
