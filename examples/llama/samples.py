"""Fixed-length training samples out of token streams, and the iterator that DeepSpeed reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from examples.llama.corpus import (
    Progress,
    build_corpus,
    corpus_digest,
    find_text,
    standard_library_files,
)
from examples.llama.indexed import IndexedDataset, is_indexed
from examples.llama.tokenizer import Tokenizer
from reft.data.order import JobPosition, SampleOrder, decode, encode
from reft.errors import ConfigError

MicroBatch = tuple[torch.Tensor, torch.Tensor]


class SampleDataset:
    """Samples of ``seq_length + 1`` tokens, cut without overlap of inputs from each stream in turn.

    Args:
        datasets: indexed datasets; documents run into each other, as in Megatron's GPT samples.
        seq_length: tokens that the model reads per sample.
    """

    def __init__(self, datasets: Sequence[IndexedDataset], seq_length: int) -> None:
        self._datasets = tuple(datasets)
        self.seq_length = seq_length
        counts = [max(0, (len(d.tokens) - 1) // seq_length) for d in datasets]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def tokens(self) -> int:
        return sum(len(d.tokens) for d in self._datasets)

    def digest(self) -> str:
        """Identity of the content, equal on nodes that hold the same tokens."""
        return "-".join(corpus_digest(d) for d in self._datasets)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[which - 1]) if which else 0)) * self.seq_length
        return self._datasets[which].tokens[start : start + self.seq_length + 1].astype(np.int64)


class MicroBatchIterator:
    """Endless ``(inputs, labels)`` of one rank, both int64 of shape (micro_batch, seq_length).

    A job's micro-batch is ``micro_batch * dp_size`` samples that follow each other, of which each
    replica gets its slice. Epochs follow each other without a gap, each in an order by (``seed``,
    epoch). Nothing is read ahead: its position is what was consumed. ``state_dict`` and
    ``load_state_dict`` make it stateful in the sense of torchdata.

    Args:
        dataset: the samples; at least one.
        vocab_size: rows of the model's embedding; larger ids are refused.
    """

    position_of_job = True
    """It counts samples of the whole job: see docs/data.md."""

    def __init__(
        self,
        dataset: SampleDataset,
        vocab_size: int,
        *,
        seed: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._order = SampleOrder(len(dataset), seed, shuffle=True)
        self._micro_batch, self._dp_rank, self._dp_size = micro_batch, dp_rank, dp_size
        self.consumed = 0
        """Samples, by the whole job."""

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> MicroBatch:
        first = self.consumed + self._dp_rank * self._micro_batch
        self.consumed += self._dp_size * self._micro_batch
        mine = np.arange(first, first + self._micro_batch, dtype=np.int64)
        samples = np.stack([self._dataset[int(index)] for index in self._order.samples(mine)])
        largest = int(samples.max())
        if largest >= self._vocab_size or samples.min() < 0:
            raise ConfigError(
                f"the data holds token {largest}, but the model has {self._vocab_size} embeddings; "
                f"it was made with another tokenizer: pass --vocab {largest + 1} or more"
            )
        tokens = torch.from_numpy(samples)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return encode(JobPosition(consumed=self.consumed), self._order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.consumed = decode(state, self._order, "data").consumed


def open_samples(
    sources: Sequence[Path],
    tokenizer: Tokenizer,
    cache_dir: Path,
    seq_length: int,
    progress: Progress | None = None,
) -> SampleDataset:
    """The samples of ``sources``: prefixes of indexed datasets as they are, the rest as text.

    Args:
        sources: files, folders or prefixes; none means the Python standard library's sources.
        tokenizer: for text.
        cache_dir: where tokenised text is kept.
        seq_length: tokens per sample.
        progress: told how far tokenising is.

    Raises:
        ConfigError: a source is missing or unreadable, or there is not enough text for one sample.
    """
    prefixes = [_prefix_of(source) for source in sources]
    datasets = [IndexedDataset(prefix) for prefix in prefixes if prefix is not None]
    texts = [source for source, prefix in zip(sources, prefixes, strict=True) if prefix is None]
    if texts or not sources:
        files = find_text(texts) if texts else standard_library_files()
        datasets.append(IndexedDataset(build_corpus(files, tokenizer, cache_dir, progress)))
    samples = SampleDataset(datasets, seq_length)
    if not len(samples):
        raise ConfigError(
            f"the data has {samples.tokens} tokens, too few for one sample of {seq_length} + 1; "
            f"give more text with --data, or lower --seq"
        )
    return samples


def _prefix_of(source: Path) -> Path | None:
    """Prefix of the indexed dataset that ``source`` names, with or without its suffix."""
    stem = source.with_suffix("") if source.suffix in (".bin", ".idx") else source
    return stem if is_indexed(stem) else None
