"""Text files to an indexed dataset, once per machine, however many processes ask for it.

The dataset lies in the cache under a key of its content: paths, sizes and modification times of the
files, and the tokenizer. One process writes it, under a file lock that a crash releases, into a
temporary folder that is renamed when it is complete: a folder with the final name is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.llama.indexed import IndexedDataset, IndexedWriter, is_indexed, token_dtype
from examples.llama.tokenizer import Tokenizer
from reft.errors import ConfigError

logger = logging.getLogger(__name__)

_FORMAT = "reft-corpus-1"
_PROBE_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a corpus is tokenised."""


@dataclass(frozen=True)
class TextFile:
    """One file of a corpus, as it was when the corpus was listed."""

    path: Path
    size_bytes: int
    mtime_ns: int


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/reft``, or ``~/.cache/reft``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reft"


def standard_library_files() -> tuple[TextFile, ...]:
    """The sources of this Python's own standard library, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(
        _describe(path)
        for path in _walk(root, _SKIPPED_FOLDERS | _NOT_STANDARD_LIBRARY)
        if path.suffix == ".py"
    )


def find_text(sources: Iterable[Path]) -> tuple[TextFile, ...]:
    """Text files at ``sources`` (files, or folders and everything below), in a fixed order.

    Hidden files, caches and binary files (a NUL byte near the beginning) are left out of folders; a
    file that is named itself is always taken.

    Raises:
        ConfigError: a source does not exist, or no text was found.
    """
    found: dict[Path, TextFile] = {}
    for source in sources:
        if source.is_dir():
            paths: Iterable[Path] = (p for p in _walk(source, _SKIPPED_FOLDERS) if _is_text(p))
        elif source.is_file():
            paths = (source,)
        else:
            raise ConfigError(
                f"--data {source}: no such file or folder, and no {source}.bin with {source}.idx "
                "either"
            )
        for path in paths:
            found.setdefault(path.resolve(), _describe(path.resolve()))
    if not any(file.size_bytes for file in found.values()):
        raise ConfigError(
            f"--data {' '.join(map(str, sources))}: found no text; expected text files, or "
            "folders of them"
        )
    return tuple(found[path] for path in sorted(found))


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skipped)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return b"\0" not in stream.read(_PROBE_BYTES)
    except OSError as error:
        logger.warning("left out of the corpus: %s", error)
        return False


def _describe(path: Path) -> TextFile:
    status = path.stat()
    return TextFile(path, status.st_size, status.st_mtime_ns)


def corpus_key(files: Sequence[TextFile], tokenizer: Tokenizer) -> str:
    """Key of a corpus: changes with any path, size, modification time or the tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_FORMAT}\n{tokenizer.fingerprint}\n".encode())
    for file in files:
        digest.update(
            f"{file.path}\0{file.size_bytes}\0{file.mtime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def build_corpus(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Path:
    """Prefix of the indexed dataset of ``files``, tokenised now unless the cache has it.

    Safe to call from any number of processes at once: one does the work, the others wait for it.

    Raises:
        ConfigError: the cache directory cannot be written.
    """
    folder = cache_dir / corpus_key(files, tokenizer)
    prefix = folder / "tokens"
    if is_indexed(prefix):
        return prefix
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")) as alone:
            if not is_indexed(prefix):
                _write_corpus(files, tokenizer, folder, alone, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot write the tokenised corpus below {cache_dir}: {error}; choose another "
            "--cache-dir"
        ) from error
    return prefix


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold ``path``'s lock; False where the file system has no locks (the rename still is
    atomic)."""
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
            alone = True
        except OSError:
            logger.warning(
                "%s cannot be locked; several processes may tokenise the same text", path
            )
            alone = False
        yield alone


def _write_corpus(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    folder: Path,
    alone: bool,
    progress: Progress | None,
) -> None:
    if alone:
        # Whoever left these behind has died: it would hold the lock otherwise.
        for stale in folder.parent.glob(f"{folder.name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
    scratch = folder.with_suffix(f".{os.uname().nodename}-{os.getpid()}.tmp")
    scratch.mkdir()
    try:
        total = sum(file.size_bytes for file in files)
        done = 0
        dtype = token_dtype(tokenizer.vocab_size)
        end = np.array([tokenizer.end_of_document], dtype=dtype)
        with IndexedWriter(scratch / "tokens", dtype) as writer:
            for file in files:
                text = file.path.read_bytes().decode("utf-8", errors="replace")
                if text:
                    writer.add(np.concatenate([tokenizer.encode(text).astype(dtype), end]))
                done += file.size_bytes
                if progress is not None:
                    progress(done, total)
        about = {"files": len(files), "tokens": writer.tokens, "tokens_blake2b": writer.digest}
        (scratch / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        # Without locks another process may have been first; its dataset is as whole as this one.
        if not is_indexed(folder / "tokens"):
            raise


def corpus_digest(dataset: IndexedDataset) -> str:
    """A short identity of a dataset's content, to compare between nodes."""
    about = dataset.prefix.parent / "about.json"
    if dataset.prefix.name == "tokens" and about.is_file():
        return str(json.loads(about.read_text(encoding="utf-8"))["tokens_blake2b"])
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dataset.dtype.str} {len(dataset.tokens)}\n".encode())
    for part in (dataset.tokens[: 1 << 16], dataset.tokens[-(1 << 16) :]):
        digest.update(np.ascontiguousarray(part).data.cast("B"))
    return digest.hexdigest()
