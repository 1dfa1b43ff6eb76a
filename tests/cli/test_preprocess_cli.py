"""tools/preprocess_data.py and tools/train_tokenizer.py from the outside: outputs, reports, exit codes."""

import gzip
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["Hello,  world\n", " \tx = 1\n\n", "\u4e2d\u6587 </s> <unk> \u2581\u2581", "a" * 5000, "\n", "end"]


def run(tool, *arguments):
    """Call a tool's main function in this process; its exit code."""
    spec = importlib.util.spec_from_file_location(tool, ROOT / "tools" / f"{tool}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def start(*arguments):
    """Start preprocess_data.py as a command."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small tokenizer, trained by the command."""
    folder = tmp_path_factory.mktemp("cli")
    text = (ROOT / "megatron_fbt" / "data" / "tokenizer.py").read_text("utf-8")
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert run("train_tokenizer", "--input", folder / "text.jsonl", "--vocab_size", 600, "--output", folder / "t") == 0
    return folder / "t.model"


def jsonl(path, records):
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    return path


def outputs(folder):
    return sorted(path.name for path in folder.iterdir() if ".bin" in path.name or ".idx" in path.name)


def documents(prefix, model):
    tokenizer = build_tokenizer(TokenizerConfig(path=str(model)))
    data = open_indexed(str(prefix), vocab_size=tokenizer.vocab_size)
    return [data[i].tolist() for i in range(len(data))], tokenizer


def test_documents_come_back_with_one_end_token_and_blank_ones_are_counted(tmp_path, model, capsys):
    blank = [{"text": ""}, {"text": " \n\t "}]
    source = jsonl(tmp_path / "a.jsonl", [*blank, *({"text": t} for t in TEXTS[:3]), blank[0], {"text": "b"}, blank[1]])
    args = ("--input", source, "--output", tmp_path / "out" / "x", "--tokenizer_path", model, "--json")
    assert run("preprocess_data", *args) == 0
    report = json.loads(capsys.readouterr().out)
    found, tokenizer = documents(tmp_path / "out" / "x", model)
    assert [tokenizer.detokenize(ids[:-1]) for ids in found] == [*TEXTS[:3], "b"]
    assert all(ids[-1] == tokenizer.eod and ids.count(tokenizer.eod) == 1 and len(ids) > 1 for ids in found)
    assert report["skipped"] == {"empty_text": 4} and report["documents"] == 4
    assert report["tokens"] == sum(map(len, found)) == (tmp_path / "out" / "x.bin").stat().st_size // 2
    assert report["text_bytes"] == sum(len(text.encode()) for text in [*TEXTS[:3], "b"])
    assert outputs(tmp_path / "out") == ["x.bin", "x.idx"]


def test_only_blank_records_are_an_error_and_leave_nothing(tmp_path, model, capsys):
    source = jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": " "}])
    assert run("preprocess_data", "--input", source, "--output", tmp_path / "x", "--tokenizer_path", model) == 3
    error = capsys.readouterr().err
    assert "a.jsonl" in error and "no document to write" in error and "'empty_text': 2" in error
    assert not outputs(tmp_path)


BAD = {
    "blank_line": b"  \n",
    "crlf": b'{"text": "a"}\r\n',
    "byte_order_mark": b'\xef\xbb\xbf{"text": "a"}\n',
    "invalid_json": b'{"text": "a"}{"text": "b"}\n',
    "not_an_object": b"42\n",
    "key_missing": b'{"t": "a"}\n',
    "text_null": b'{"text": null}\n',
    "text_not_a_string": b'{"text": 1}\n',
    "nul_character": b'{"text": "\\u0000"}\n',
    "lone_surrogate": b'{"text": "\\ud800"}\n',
    "invalid_utf8": b'{"text": "\xff"}\n',
    "no_final_newline": b'{"text": "a"}',
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_an_error_with_file_and_line_or_skipped_and_counted(tmp_path, model, capsys, kind):
    good = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]).read_bytes()
    (tmp_path / "a.jsonl").write_bytes(good + BAD[kind])
    args = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "x", "--tokenizer_path", model, "--json")
    assert run("preprocess_data", *args) == 3
    error = capsys.readouterr().err
    assert f"a.jsonl, line {len(TEXTS) + 1}:" in error and kind in error and "--skip_bad_lines" in error
    assert not outputs(tmp_path)
    assert run("preprocess_data", *args, "--skip_bad_lines") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == {"empty_text": 1, kind: 1} and report["documents"] == len(TEXTS) - 1


def write_folder(folder):
    """Many chunks of good, bad and blank lines in plain and compressed files."""
    folder.mkdir()
    lines = [json.dumps({"text": f"{i} " + TEXTS[i % len(TEXTS)] * (i % 7)}).encode() + b"\n" for i in range(3000)]
    for i, bad in enumerate(list(BAD.values())[:-1]):
        lines.insert(211 * (i + 1), bad)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:1200]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1200:2000])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines[2000:])))
    (folder / "._a.jsonl").write_bytes(b"\0")
    (folder / "d.jsonl").write_bytes(b"")
    return folder


def test_the_output_is_byte_identical_for_one_and_eight_workers(tmp_path, model, capsys):
    folder, results = write_folder(tmp_path / "in"), []
    for workers in (1, 8):
        args = ("--input", folder, "--output", tmp_path / f"x{workers}", "--tokenizer_path", model, "--json")
        assert run("preprocess_data", *args, "--skip_bad_lines", "--workers", workers) == 0
        report = json.loads(capsys.readouterr().out)
        content = [(tmp_path / f"x{workers}{ending}").read_bytes() for ending in (".bin", ".idx")]
        results.append((content, report["documents"], report["tokens"], report["skipped"]))
    assert results[0] == results[1] and results[0][1] == 3000
    assert results[0][3] == dict.fromkeys(sorted(list(BAD)[:-1]), 1)


def test_a_truncated_file_among_others_is_named(tmp_path, model, capsys):
    folder = write_folder(tmp_path / "in")
    (folder / "bb.jsonl.gz").write_bytes((folder / "b.jsonl.gz").read_bytes()[:-20])
    args = ("--input", folder, "--output", tmp_path / "x", "--tokenizer_path", model, "--skip_bad_lines")
    assert run("preprocess_data", *args) == 3
    assert "bb.jsonl.gz: the compressed file is cut off" in capsys.readouterr().err
    assert not outputs(tmp_path)


def test_several_keys_give_an_output_each(tmp_path, model):
    source = jsonl(tmp_path / "a.jsonl", [{"title": "T", "text": "one"}, {"title": "", "text": "two"}])
    args = ("--input", source, "--output", tmp_path / "x", "--tokenizer_path", model, "--json_key", "text", "title")
    assert run("preprocess_data", *args) == 0
    assert outputs(tmp_path) == ["x_text.bin", "x_text.idx", "x_title.bin", "x_title.idx"]
    texts = {}
    for key in ("text", "title"):
        found, tokenizer = documents(tmp_path / f"x_{key}", model)
        texts[key] = [tokenizer.detokenize(ids) for ids in found]
    assert texts == {"text": ["one", "two"], "title": ["T"]}


def test_a_folder_of_text_files_gives_one_document_a_file(tmp_path, model, capsys):
    for name, content in {"b.py": b"x = 1\n", "a/r.rst": b"Title\n", "a/bad.txt": b"\xff", "no.bin": b"z"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    args = ("--input", tmp_path / "in", "--output", tmp_path / "x", "--tokenizer_path", model, "--json")
    files = ("--input_format", "files", "--suffix", ".py", ".rst", ".txt")
    assert run("preprocess_data", *args, *files) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {"invalid_utf8": 1}
    found, tokenizer = documents(tmp_path / "x", model)
    assert [tokenizer.detokenize(ids) for ids in found] == ["Title\n", "x = 1\n"]


def test_a_huggingface_tokenizer_whose_end_token_stands_in_the_text(tmp_path, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**alphabet, "<|end|>": 256}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(str(tmp_path / "hf"))
    text = "a <|end|> b"
    source = jsonl(tmp_path / "a.jsonl", [{"text": text}])
    args = ("--input", source, "--output", tmp_path / "x", "--tokenizer_type", "huggingface")
    assert run("preprocess_data", *args, "--tokenizer_path", tmp_path / "hf") == 0
    data = open_indexed(str(tmp_path / "x"), vocab_size=257)
    assert data[0].tolist() == [alphabet[{" ": "\u0120"}.get(c, c)] for c in text] + [256]


def test_a_tokenizer_without_end_token_is_refused_before_any_data_are_read(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    (tmp_path / "hf").mkdir()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "hf" / "tokenizer.json"))
    args = ("--input", tmp_path / "not_there", "--output", tmp_path / "x", "--tokenizer_type", "huggingface")
    assert run("preprocess_data", *args, "--tokenizer_path", tmp_path / "hf") == 3
    assert "no eos_token" in capsys.readouterr().err and not outputs(tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--workers", "0"), "--workers is 0"),
        (("--json_key", "a", "a"), "--json_key"),
        (("--output", "x/"), "--output"),
    ],
)
def test_impossible_options_are_exit_code_2(tmp_path, model, capsys, arguments, message):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    args = ("--input", source, "--output", tmp_path / "x", "--tokenizer_path", model, *arguments)
    assert run("preprocess_data", *args) == 2 and message in capsys.readouterr().err


def test_shards_are_checked_and_merged_by_the_same_tool(tmp_path, model, capsys):
    for name in ("a", "b", "c"):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(4)])
    args = ("--input", tmp_path / "[abc].jsonl", "--output", tmp_path / "x", "--tokenizer_path", model, "--json")
    for rank in (1, 0):
        assert run("preprocess_data", *args, "--shards", 3, "--num_nodes", 2, "--node_rank", rank) == 0
    *_, report = map(json.loads, capsys.readouterr().out.splitlines())
    assert report["shards"] == {"made": 2, "kept": 0, "of": 3} and report["documents"] == 8
    merge = ("merge", tmp_path / "x.manifest.json", "--output", tmp_path / "all")
    assert run("preprocess_data", *merge) == 0 and run("preprocess_data", *merge) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run("preprocess_data", "validate", tmp_path / "all", tmp_path / "x.manifest.json") == 0
    assert "4 shards, 24 documents" in capsys.readouterr().out
    found, tokenizer = documents(tmp_path / "all", model)
    assert [tokenizer.detokenize(ids) for ids in found] == [f"{name} {i}" for name in "abc" for i in range(4)]
    (tmp_path / "all.bin").write_bytes(b"")
    assert run("preprocess_data", "validate", tmp_path / "all") == 3
    assert "all.bin: size: 0 bytes found" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "merge"])
def test_subcommands_have_a_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        run("preprocess_data", command, "--help")
    assert end.value.code == 0 and f"python tools/preprocess_data.py {command}" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["preprocess_data", "train_tokenizer"])
def test_help_has_an_example_and_tools_are_short(tool, capsys):
    with pytest.raises(SystemExit) as end:
        run(tool, "--help")
    assert end.value.code == 0 and f"python tools/{tool}.py --input" in capsys.readouterr().out
    assert len((ROOT / "tools" / f"{tool}.py").read_text("utf-8").splitlines()) <= 80


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, model, capsys):
    source = jsonl(tmp_path / "a.jsonl", [{"text": str(i) * 400} for i in range(1000)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        code = run("preprocess_data", "--input", source, "--output", tmp_path / "x", "--tokenizer_path", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3 and "x.bin: cannot be written" in capsys.readouterr().err and not outputs(tmp_path)


def workers_of(process):
    """Process ids of the encoding processes, once there are two of them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        spawned = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        if len(spawned) == 2:
            return spawned
        time.sleep(0.05)
    process.kill()
    raise AssertionError("no workers")


def endless_input(tmp_path):
    """A named pipe that keeps the command at work until the test has done its worst."""
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("victim", ["worker", "main process", "main process, politely", "terminal"])
def test_a_killed_process_ends_the_command_and_the_next_run_starts_clean(tmp_path, model, victim):
    pipe = endless_input(tmp_path)
    args = ("--output", tmp_path / "x", "--tokenizer_path", model, "--workers", 2)
    process = start("--input", pipe, *args)
    line = json.dumps({"text": TEXTS[0] * 300}).encode() + b"\n"
    with open(pipe, "wb", buffering=0) as stream:
        for _ in range(600):  # some blocks of input
            stream.write(line)
        workers = workers_of(process)
        number = {"main process, politely": signal.SIGTERM, "terminal": signal.SIGHUP}.get(victim, signal.SIGKILL)
        os.kill(workers[0] if victim == "worker" else process.pid, number)
        deadline = time.monotonic() + 60
        try:
            while process.poll() is None and time.monotonic() < deadline:
                stream.write(line)
        except BrokenPipeError:
            pass
    _, error = process.communicate(timeout=60)
    codes = {"worker": 3, "main process": -9, "main process, politely": 143, "terminal": 129}
    assert process.returncode == codes[victim]
    assert victim != "worker" or "a worker process died" in error
    left = {name for name in os.listdir(tmp_path) if name.startswith("x")}
    assert not left - ({"x.bin.partial", "x.lock"} if victim == "main process" else set())
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers are left behind"
        time.sleep(0.1)
    source = jsonl(tmp_path / "a.jsonl", [{"text": "again"}])
    assert run("preprocess_data", "--input", source, *args[:4]) == 0
    assert outputs(tmp_path) == ["x.bin", "x.idx"] and len(documents(tmp_path / "x", model)[0]) == 1


def test_the_same_command_twice_at_once_is_refused_and_the_first_one_finishes(tmp_path, model, capsys):
    pipe, line = endless_input(tmp_path), json.dumps({"text": TEXTS[0] * 300}).encode() + b"\n"
    args = ("--input", pipe, "--output", tmp_path / "x", "--tokenizer_path", model)
    process = start(*args)
    with open(pipe, "wb", buffering=0) as stream:
        for _ in range(600):  # some blocks of input
            stream.write(line)
        while not (tmp_path / "x.bin.partial").exists():
            assert process.poll() is None
            time.sleep(0.01)
        other = jsonl(tmp_path / "other.jsonl", [{"text": "other"}])
        for overwrite in ((), ("--overwrite",)):
            assert run("preprocess_data", "--input", other, *args[2:], *overwrite) == 3
            assert f"another process ({process.pid} on " in capsys.readouterr().err
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "documents: 600\n" in out and len(documents(tmp_path / "x", model)[0]) == 600
    assert (tmp_path / "x.manifest.json").exists() and not (tmp_path / "x.lock").exists()


def test_a_reader_that_has_left_and_an_encoding_without_umlauts_end_no_report(tmp_path, model):
    source, folder = jsonl(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "f\u00fc"
    tool = f"{sys.executable} {ROOT}/tools/preprocess_data.py --input {source} --tokenizer_path {model} --output "
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    pipe = {"env": environment, "shell": True, "executable": "/bin/bash", "capture_output": True, "timeout": 120}
    left = subprocess.run(f"{tool} {folder}/x > >(exec 0<&-; sleep 0); echo $?", **pipe)
    again = subprocess.run(f"{tool} {folder}/x", **pipe)
    assert left.stdout == b"0\n" and b"Traceback" not in left.stderr
    assert again.returncode == 0 and b"f\\xfc/x" in again.stdout and b"Traceback" not in again.stderr


def test_the_command_works_in_the_c_locale_and_prints_its_report(tmp_path, model):
    folder = tmp_path / "f\u00f6lder"
    folder.mkdir()
    jsonl(folder / "a.jsonl", [{"text": "\u4e2d"}])
    process = start("--input", folder, "--output", folder / "x", "--tokenizer_path", model)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "") and "documents: 1\n" in out
