"""The fingerprint of a job: facts about its configuration, layout and data that must be equal
before stored state is restored (P7). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reft.errors import FingerprintError

if TYPE_CHECKING:
    pass


Fact = str | int | float | bool | None

_FORMAT = 1

_BATCH = ("config.train_batch_size", "config.train_micro_batch_size_per_gpu")

# Key in the ``reft`` block that lists the facts about the job (script, seed, ...) allowed to differ
# from the saved version's
ACCEPT_KEY = "accept_changes"

AT_LAUNCH = ("script", "seed", "arguments")
"""Facts that are compared when a person starts the job, not when it restarts automatically: the
path of the script may differ between nodes, and a job whose seed is taken from the clock must
still be able to use its own memory."""

BY_REPLICAS = ("layout.dp", "config.gradient_accumulation_steps")
"""Facts that change with the number of replicas even if the global batch stays the same. Not
compared when a version of another data-parallel degree is restored."""

BY_LAYOUT = (*BY_REPLICAS, "layout", "model")
"""Facts that are not compared when a version of another layout is restored: the model is then
compared parameter by parameter."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_AROUND = _word_set(
    """
    accept cache checkpoint checkpoints checkpointed checkpointing ckpt debug deepspeed disable eval
    exit host hostfile hub job kill load log logdir logging logs node nodes out output pin port
    predict print prof profile project push quiet reft report restore resume run save saves
    tensorboard test threads timeout timing tmp tqdm val valid validation verbose wandb workers
    """
)
"""Options with one of these words in their names never change the numerical results, such as
``eval_steps``."""
_DECIDES = _word_set(
    """
    accumulation anneal annealing batch corpora corpus data dataset datasets decay drop file files
    lr merge merges model rampup rate scheduler seed split tokenizer vocab vocabulary warmup
    """
)
"""Of the other options, those with one of these words change the numerical results, such as
``lr-decay-iters``."""
_HOW_LONG_AND_WHERE = _word_set(
    """
    config dir directory epoch epochs every folder interval iter iters iteration iterations keep
    memory path rank step steps stop until wait
    """
)
"""Of the options that are still left, those with one of these words do not change the numerical
results: they set durations, intervals and paths, such as ``max_steps``."""
_LENGTHS = frozenset({("skip", "train"), ("train", "samples"), ("train", "tokens")})


@dataclass(frozen=True)
class Fingerprint:
    """Facts of a job by dotted name, such as ``config.optimizer.params.lr`` or ``layout.dp``."""

    facts: Mapping[str, Fact]

    def without(self, names: Collection[str]) -> Fingerprint:
        """Return a copy without the named facts and all facts under them."""
        return Fingerprint(
            {name: fact for name, fact in self.facts.items() if not _is_under(name, names)}
        )

    def only(self, names: Collection[str]) -> Fingerprint:
        """Return a copy with only the named facts and all facts under them."""
        return Fingerprint(
            {name: fact for name, fact in self.facts.items() if _is_under(name, names)}
        )

    def encode(self) -> bytes:
        """Return the facts as JSON; equal facts give equal bytes."""
        return json.dumps({"format": _FORMAT, "facts": dict(sorted(self.facts.items()))}).encode()

    @classmethod
    def decode(cls, data: bytes | str) -> Fingerprint:
        """Decode the output of :meth:`encode`. Raises FingerprintError if ``data`` is invalid or
        has another format."""
        try:
            content = json.loads(data)
            facts = content["facts"] if content["format"] == _FORMAT else None
        except (ValueError, KeyError, TypeError):
            facts = None
        if not isinstance(facts, dict) or not all(
            isinstance(fact, Fact) for fact in facts.values()
        ):
            raise FingerprintError(
                "the fingerprint of the stored state cannot be read: expected a JSON object of "
                "format "
                f"{_FORMAT} with facts; it was damaged, or written by another release of reft"
            )
        return cls(facts)


def read_argument_facts(arguments: Sequence[str]) -> dict[str, Fact]:
    """Return those arguments of a script that may change its numerical results, as facts
    ``arguments.NAME``.

    The words of an option's name decide whether the argument counts, and is returned:

    - an option about saving, evaluation, logs and the like never counts;
    - an option that names the learning rate, its schedule, batches, data or the model always
      counts;
    - of the others, options for durations, intervals and paths do not count; all else does.

    So a job that is started again for more steps, or from another directory, is the same job. If an
    option names data or a model, only the last part of its path counts; other paths, and JSON
    texts, do not count.
    """
    given: dict[str, list[str]] = {"": []}
    name = ""
    for word in arguments:
        if word.startswith("-") and not _NUMBER.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            given[name] = [value] if equals else []
        # An assignment NAME=VALUE, as Hydra takes them
        elif not name and _ASSIGNMENT.match(word):
            key, _, value = word.partition("=")
            given[key] = [value]
        else:
            given[name].append(word)
    found: dict[str, Fact] = {}
    for name, values in given.items():
        if (name or values) and _counts(name):
            shown = [_last_part(value) if _decides(name) else value for value in values]
            if not any("/" in value or value.startswith(("{", "[")) for value in shown):
                found[f"arguments.{name or 'positional'}"] = " ".join(shown)
    return found


_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")

_NUMBER = re.compile(r"-\.?\d")


def _words(name: str) -> list[str]:
    return re.split(r"[-_.]+", name.lower().replace("drop_out", "drop").replace("drop-out", "drop"))


def _decides(name: str) -> bool:
    return not _DECIDES.isdisjoint(_words(name))


def _counts(name: str) -> bool:
    words = _words(name)
    if not _AROUND.isdisjoint(words) or tuple(words) in _LENGTHS:
        return False
    return not _DECIDES.isdisjoint(words) or _HOW_LONG_AND_WHERE.isdisjoint(words)


def _last_part(value: str) -> str:
    """Return the last part of a path. JSON objects and lists are returned unchanged."""
    return value if value.startswith(("{", "[")) else value.rstrip("/").rpartition("/")[2]


def changed(was: Fingerprint, now: Fingerprint) -> list[str]:
    """Return the sorted names of the facts that differ, or that only one of the fingerprints
    has."""
    missing = object()
    names = sorted(was.facts.keys() | now.facts.keys())
    return [
        name
        for name in names
        if not _same(was.facts.get(name, missing), now.facts.get(name, missing))
    ]


def differences(was: Fingerprint, now: Fingerprint) -> list[str]:
    """Return a line for each fact that differs: ``layout.dp: was 2, is 4``."""
    return [f"{name}: was {_show(was, name)}, is {_show(now, name)}" for name in changed(was, now)]


def require_same(
    was: Fingerprint, now: Fingerprint, *, of: str, accepted: Collection[str] = ()
) -> None:
    """Refuse stored state of another job, or of this job with other settings.

    Args:
        was: fingerprint of the stored state.
        now: fingerprint of this job.
        of: description of the stored state for the message, such as ``the memory of job train``.
        accepted: names of facts that may differ, with all facts under them (``accept_changes``).

    Raises:
        FingerprintError: names every fact that differs.
    """
    was, now = was.without(accepted), now.without(accepted)
    names = changed(was, now)
    if not names:
        return
    raise FingerprintError(
        f"{of} was written by a job that differs from this one:\n"
        + "".join(f"  {line}\n" for line in differences(was, now))
        + (
            "Restore these settings to continue it; give this job a name of its own (--job-id "
            'NAME, or "job_id" in the reft block), or remove the old memory (`reft clean --job '
            "NAME`), to start from the beginning; or, to resume in spite of the differences, write "
            f'"{ACCEPT_KEY}": {json.dumps(names)} into the reft '
            f"block{_describe_arguments(names)}{_describe_batch(was, names)}"
        )
    )


def _describe_arguments(names: Sequence[str]) -> str:
    if not any(_is_under(name, ["arguments"]) for name in names):
        return ""
    return (
        f'. reft knows only by their names which arguments change the numbers; "{ACCEPT_KEY}": '
        '["arguments"] leaves all of them out, for good'
    )


def _describe_batch(was: Fingerprint, names: Sequence[str]) -> str:
    """Return advice on the configuration keys that keep the stored state's global batch with any
    number of replicas; "" if the batch is unchanged.
    """
    if not any(name in names for name in _BATCH):
        return ""
    keys = [
        f'"{name.removeprefix("config.")}": {was.facts[name]}'
        for name in _BATCH
        if name in was.facts
    ]
    if len(keys) < len(_BATCH):
        return ""
    return (
        f". To continue with fewer or more replicas, write {' and '.join(keys)} into DeepSpeed's "
        'JSON, and no "gradient_accumulation_steps", which DeepSpeed then derives: the global '
        "batch stays what it was"
    )


def _is_under(name: str, tops: Collection[str]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


def _same(a: object, b: object) -> bool:
    # In Python, 1 == 1.0 == True. In a configuration 1 and 1.0 are the same, 1 and true are not.
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _show(fingerprint: Fingerprint, name: str) -> str:
    return json.dumps(fingerprint.facts[name]) if name in fingerprint.facts else "not set"
