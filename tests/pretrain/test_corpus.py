"""Text to tokens: what is read, what is cached, and that only one process does the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama.corpus import (
    build_corpus,
    corpus_digest,
    corpus_key,
    find_text,
    standard_library_files,
)
from examples.llama.indexed import IndexedDataset
from examples.llama.tokenizer import ByteTokenizer, load_tokenizer
from reft.errors import ConfigError
from tests.pretrain.conftest import ROOT, environment

RACE = """
import sys
from pathlib import Path
from examples.llama import corpus
from examples.llama.tokenizer import ByteTokenizer
class Counting(ByteTokenizer):
    calls = 0
    def encode(self, text):
        Counting.calls += 1
        return super().encode(text)
files = corpus.find_text([Path(sys.argv[1])])
print("ready", flush=True)
sys.stdin.readline()
prefix = corpus.build_corpus(files, Counting(), Path(sys.argv[2]))
print(Counting.calls, prefix)
"""


def test_text_is_found_in_order_and_binaries_are_not(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name, content in {
        "z.txt": b"last",
        "b/a.md": b"first \xff broken",
        "b/image.png": b"\x89PNG\0\0",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "__pycache__/x.txt": b"cache",
    }.items():
        (tmp_path / name).write_bytes(content)
    files = find_text([tmp_path, tmp_path / "z.txt"])
    assert [str(f.path.relative_to(tmp_path.resolve())) for f in files] == ["b/a.md", "z.txt"]
    dataset = IndexedDataset(build_corpus(files, ByteTokenizer(), tmp_path / "cache"))
    texts = [bytes(int(t) for t in document[:-1]) for document in dataset]
    assert texts == ["first \ufffd broken".encode(), b"last"]
    assert all(document[-1] == ByteTokenizer.end_of_document for document in dataset)


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        find_text([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="found no text"):
        find_text([tmp_path])


def test_cache_is_keyed_by_content_and_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a").write_text("one")
    files = find_text([text])
    key = corpus_key(files, ByteTokenizer())
    prefix = build_corpus(files, ByteTokenizer(), tmp_path / "cache")
    before = prefix.with_name("tokens.bin").stat().st_mtime_ns
    assert build_corpus(find_text([text]), ByteTokenizer(), tmp_path / "cache") == prefix
    assert prefix.with_name("tokens.bin").stat().st_mtime_ns == before
    (text / "a").write_text("two")
    os.utime(text / "a", ns=(1, 1))
    assert corpus_key(find_text([text]), ByteTokenizer()) != key
    other = ByteTokenizer()
    other.fingerprint = "other"
    assert corpus_key(files, other) != key
    changed = IndexedDataset(build_corpus(find_text([text]), ByteTokenizer(), tmp_path / "cache"))
    assert corpus_digest(changed) != corpus_digest(IndexedDataset(prefix))


@pytest.mark.process
def test_four_processes_race_and_one_tokenises(tmp_path: Path, text_folder: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    # What a killed process leaves behind must neither be used nor stay.
    key = corpus_key(find_text([text_folder]), ByteTokenizer())
    (cache / f"{key}.dead-1.tmp").mkdir()
    command = [sys.executable, "-c", RACE, str(text_folder), str(cache)]
    racers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
        )
        for _ in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        lines = [racer.communicate(timeout=60)[0].split() for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(int(calls) for calls, _ in lines) == [0, 0, 0, 10]
    assert len({prefix for _, prefix in lines}) == 1
    assert sorted(p.name for p in cache.iterdir()) == sorted([key, f"{key}.lock"])
    about = json.loads((cache / key / "about.json").read_text())
    assert about["tokens"] == len(IndexedDataset(cache / key / "tokens").tokens)


def test_a_failure_while_tokenising_leaves_nothing(tmp_path: Path, text_folder: Path) -> None:
    class Broken(ByteTokenizer):
        def encode(self, text: str):
            raise RuntimeError("broken tokenizer")

    with pytest.raises(RuntimeError, match="broken tokenizer"):
        build_corpus(find_text([text_folder]), Broken(), tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_unwritable_cache_says_what_to_change(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="choose another --cache-dir"):
        build_corpus(find_text([text_folder]), ByteTokenizer(), tmp_path / "cache")


def test_cache_that_is_a_file_says_what_to_change(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match="choose another --cache-dir"):
        build_corpus(find_text([text_folder]), ByteTokenizer(), tmp_path / "cache")


def test_a_bare_machine_has_a_corpus() -> None:
    files = standard_library_files()
    names = {file.path.name for file in files}
    assert {"argparse.py", "ast.py", "typing.py"} <= names
    assert sum(file.size_bytes for file in files) > 5_000_000
    assert not any("site-packages" in file.path.parts for file in files)


def test_tokenizers_that_cannot_be_loaded_say_why(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(None), ByteTokenizer)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(ConfigError, match="expected 'bytes', a SentencePiece"):
        load_tokenizer(str(tmp_path / "missing.model"))
    for name, package in (("tokenizer.model", "sentencepiece"), ("tokenizer.json", "tokenizers")):
        try:
            __import__(package)
        except ImportError:
            (tmp_path / name).write_text("{}")
            with pytest.raises(ConfigError, match=f"pip install {package}"):
                load_tokenizer(str(tmp_path / name))
