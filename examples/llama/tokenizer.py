"""Tokenizers: bytes by default, SentencePiece and Hugging Face files where those packages exist."""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.errors import ConfigError


class Tokenizer(ABC):
    """Text to token ids.

    Attributes:
        vocab_size: ids are below it.
        end_of_document: id written after every document.
        fingerprint: equal for tokenizers that give equal ids.
    """

    vocab_size: int
    end_of_document: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> npt.NDArray[Any]:
        """Token ids of ``text``, without special tokens."""


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, then begin (256), end of document (257) and padding (258)."""

    vocab_size = 259
    end_of_document = 257
    fingerprint = "bytes-1"

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


class SentencePieceTokenizer(Tokenizer):
    """A ``.model`` file, such as Llama-2's own ``tokenizer.model``."""

    def __init__(self, path: Path) -> None:
        package = _import("sentencepiece", path)
        self._processor: Any = package.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = int(self._processor.get_piece_size())
        self.end_of_document = int(self._processor.eos_id())
        self.fingerprint = _hash_file(path)
        if self.end_of_document < 0:
            raise ConfigError(
                f"tokenizer {path} has no end-of-sentence token; train it with one (eos_id)"
            )

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.array(self._processor.encode(text), dtype=np.int32)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` file."""

    _END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")

    def __init__(self, path: Path) -> None:
        package = _import("tokenizers", path)
        self._tokenizer: Any = package.Tokenizer.from_file(str(path))
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        self.fingerprint = _hash_file(path)
        ids = (self._tokenizer.token_to_id(token) for token in self._END_TOKENS)
        end = next((found for found in ids if found is not None), None)
        if end is None:
            raise ConfigError(
                f"tokenizer {path} has no end-of-document token; expected one of "
                f"{', '.join(self._END_TOKENS)}"
            )
        self.end_of_document = int(end)

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def load_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer ``name``: ``None`` or ``"bytes"``, or the path of a file or of a folder that
    has one.

    Raises:
        ConfigError: no such file, unknown kind, or the package that reads it is not installed.
    """
    if name is None or name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        candidates = [path / "tokenizer.json", path / "tokenizer.model"]
        path = next((c for c in candidates if c.is_file()), path)
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.is_file() and path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise ConfigError(
        f"--tokenizer {name}: expected 'bytes', a SentencePiece .model file, a Hugging Face "
        "tokenizer.json, or a folder with one of them"
    )


def _import(package: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer {path} needs the package {package!r}, which is not installed; "
            f"run 'pip install {package}', or leave --tokenizer out for byte-level tokens"
        ) from error


def _hash_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
