"""Facts of a job that must be equal before stored state is restored (P7). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import TYPE_CHECKING

from reft.errors import FingerprintError

if TYPE_CHECKING:
    pass


Fact = str | int | float | bool | None

_FORMAT = 1

_BATCH = ("config.train_batch_size", "config.train_micro_batch_size_per_gpu")

ACCEPT_KEY = "accept_changes"  # key of the ``reft`` block that lists facts which may differ

AT_LAUNCH = ("script", "seed", "arguments")
"""Compared when a person starts the job. Not when it restarts by itself: another node may see the
script under another path, and a seed that is taken from the clock must not keep a job from its own
memory."""

BY_REPLICAS = ("layout.dp", "config.gradient_accumulation_steps")
"""What follows from the number of replicas where the global batch is kept. Not compared where a
version of another data-parallel degree is taken up."""

BY_LAYOUT = (*BY_REPLICAS, "layout", "model")
"""Likewise where a version of another layout is taken up; the model is then compared name by
name."""

_AROUND = re.compile(
    r"accept|cache|checkpoint(s|ed|ing)?|ckpt|debug|deepspeed|disable|eval|exit|host(file)?|hub|job|kill|load|log"
    r"|logdir|logging|logs|nodes?|out|output|pin|port|predict|print|prof|profile|project|push|quiet|reft|report"
    r"|restore|resume|run|saves?|tensorboard|test|threads|timeout|timing|tmp|tqdm|val|valid|validation|verbose"
    r"|wandb|workers"
)
"""Words of an option for what goes on around training, whatever its other words are:
``eval_steps``."""

_DECIDES = re.compile(
    r"accumulation|anneal|annealing|batch|corpora|corpus|data|datasets?|decay|drop|files?|lr|merges?|model|rampup"
    r"|rate|scheduler|seed|split|tokenizer|vocab|vocabulary|warmup"
)
"""Words that make an option one for the numbers, whatever else is in its name:
``lr-decay-iters``."""

_HOW_LONG_AND_WHERE = re.compile(
    r"config|dir|directory|epochs?|every|folder|interval|iter|iterations?|iters|keep|memory|path|rank|steps?|stop"
    r"|until|wait"
)
"""Words for how long a job trains, how often it does something, and where things are:
``max_steps``."""

_LENGTHS = frozenset({("skip", "train"), ("train", "samples"), ("train", "tokens")})


@dataclass(frozen=True)
class Fingerprint:
    """Facts of a job by dotted name, such as ``config.optimizer.params.lr`` or ``layout.dp``."""

    facts: Mapping[str, Fact]

    def without(self, names: Collection[str]) -> Fingerprint:
        """The same without some facts and what lies under them."""
        return Fingerprint(
            {name: fact for name, fact in self.facts.items() if not _is_under(name, names)}
        )

    def only(self, names: Collection[str]) -> Fingerprint:
        return Fingerprint(
            {name: fact for name, fact in self.facts.items() if _is_under(name, names)}
        )

    def encode(self) -> bytes:
        """JSON, equal for equal facts."""
        return json.dumps({"format": _FORMAT, "facts": dict(sorted(self.facts.items()))}).encode()

    @classmethod
    def decode(cls, data: bytes | str) -> Fingerprint:
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
    """A script's arguments that may change what it trains, as facts ``arguments.NAME``.

    The rule goes by the words of an option's name. What goes on around training (``save``,
    ``eval``, ``log``) never counts; what names the learning rate, its schedule, batches, data or
    model always does; of the rest, what says how long, how often and where does not, and everything
    else does. A job that is started again for more steps, or from another directory, is the same
    one. Of a path the last part counts where it names data or a model; other paths, and JSON texts,
    do not."""
    given: dict[str, list[str]] = {"": []}
    name = ""
    for word in arguments:
        if word.startswith("-") and not _NUMBER.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            given[name] = [value] if equals else []
        elif not name and _ASSIGNMENT.match(word):  # Hydra's
            key, _, value = word.partition("=")
            given[key] = [value]
        else:
            given[name].append(word)
    found: dict[str, Fact] = {}
    for name, values in given.items():
        if (name or values) and _counts(name):
            told = [_last_part(value) if _decides(name) else value for value in values]
            if not any("/" in value or value.startswith(("{", "[")) for value in told):
                found[f"arguments.{name or 'positional'}"] = " ".join(told)
    return found


_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")

_NUMBER = re.compile(r"-\.?\d")


def _words(name: str) -> list[str]:
    return re.split(r"[-_.]+", name.lower().replace("drop_out", "drop").replace("drop-out", "drop"))


def _any(words: Pattern[str], name: str) -> bool:
    return any(words.fullmatch(word) for word in _words(name))


def _decides(name: str) -> bool:
    return _any(_DECIDES, name)


def _counts(name: str) -> bool:
    if _any(_AROUND, name) or tuple(_words(name)) in _LENGTHS:
        return False
    return _decides(name) or not _any(_HOW_LONG_AND_WHERE, name)


def _last_part(value: str) -> str:
    """Of a path; a text in brackets stays what it is."""
    return value if value.startswith(("{", "[")) else value.rstrip("/").rpartition("/")[2]


def changed(was: Fingerprint, now: Fingerprint) -> list[str]:
    """Names of the facts that differ, in order; one that only one side has differs."""
    missing = object()
    names = sorted(was.facts.keys() | now.facts.keys())
    return [
        name
        for name in names
        if not _same(was.facts.get(name, missing), now.facts.get(name, missing))
    ]


def differences(was: Fingerprint, now: Fingerprint) -> list[str]:
    """A line for each fact that differs: ``layout.dp: was 2, is 4``; empty where none does."""
    return [f"{name}: was {_show(was, name)}, is {_show(now, name)}" for name in changed(was, now)]


def require_same(
    was: Fingerprint, now: Fingerprint, *, of: str, accepted: Collection[str] = ()
) -> None:
    """Refuse stored state that belongs to another job, or to this one with other settings. ``of``:
    what holds the state, for the message: ``the memory of job train``. ``accepted``: names of facts
    that may differ, with all under them (``reft.accept_changes``)."""
    was, now = was.without(accepted), now.without(accepted)
    names = changed(was, now)
    if not names:
        return
    raise FingerprintError(
        f"{of} was written by a job that differs from this one:\n"
        + "".join(f"  {line}\n" for line in differences(was, now))
        + (
            "Restore these settings to continue it; give this job a name of its own (--job-id "
            "NAME, or "
            '"job_id" in the reft block), or remove the old memory (`reft clean --job NAME`), to '
            "start "
            f'from the beginning; or, to resume in spite of the differences, write "{ACCEPT_KEY}": '
            f"{json.dumps(names)} into the reft block{_describe_arguments(names)}"
            f"{_describe_batch(was, names)}"
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
    """Which keys keep the batch of the stored state, whatever the number of replicas."""
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
        f". To go on with fewer or more replicas, write {' and '.join(keys)} into DeepSpeed's "
        "JSON, and no "
        '"gradient_accumulation_steps", which DeepSpeed then derives: the global batch stays '
        "what it was"
    )


def _is_under(name: str, tops: Collection[str]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


def _same(a: object, b: object) -> bool:
    # 1 == 1.0 == True in Python; a JSON that says 1 where it said 1.0 is not another job.
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _show(fingerprint: Fingerprint, name: str) -> str:
    return json.dumps(fingerprint.facts[name]) if name in fingerprint.facts else "not set"
