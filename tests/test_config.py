"""The reft block: what is refused, and what the message says to write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.cli import main
from reft.config import PRESETS, explain, load_config, parse_block
from reft.engine.identity import log_sibling_jobs
from reft.errors import ConfigError
from reft.memory.jobdir import JobDir
from reft.naming import is_name, make_run_name, own_name, safe_name


def test_p10_an_absent_block_is_off() -> None:
    assert not load_config({"train_batch_size": 8}).enabled
    assert not load_config(None).enabled


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"enabeld": True}, 'did you mean "enabled"'),
        ({"persist": {"directory": "/x"}}, "persist.directory: unknown key"),
        ({"persist": {"interval_steps": 5}}, 'needs "dir"'),
        ({"persist": {"interval_steps": "auto"}}, 'needs "dir"'),
        ({"persist": {"dir": "/x", "interval_steps": -1}}, "write a number of steps, 0"),
        (
            {"persist": {"dir": "/x", "interval_steps": 5, "max_overhead": 0.1}},
            'belongs to "interval_steps"',
        ),
        (
            {"persist": {"dir": "/x", "survival": 0.999}},
            'persist.survival belongs to "interval_steps": "auto"',
        ),
        ({"persist": {"dir": "/x", "interval_steps": "auto", "survival": 1}}, "persist.survival"),
        (
            {
                "interval_steps": 3,
                "persist": {"dir": "/x", "interval_steps": "auto", "max_lost_steps": 5},
            },
            "write at least 6",
        ),
        ({"interval_steps": 2, "persist": {"dir": "/x", "interval_steps": 5}}, "multiple of 2"),
        ({"interval_steps": "often"}, "auto"),
        ({"interval_steps": 0}, "greater than or equal to 1"),
        ({"max_lost_steps": 8}, 'belongs to "interval_steps": "auto"'),
        ({"interval_steps": "auto", "max_lost_steps": 3}, "greater than or equal to 4"),
        (
            {
                "interval_steps": "auto",
                "persist": {"dir": "/x", "interval_steps": "auto", "max_lost_steps": 3},
            },
            "write at least 4",
        ),
        ({"protection": "aec+aor", "interval_steps": "auto"}, "interval_steps is auto; write 1"),
        ({"protection": "none", "copies": 1}, 'remove "copies"'),
        ({"protection": "none+aor"}, '"aec+aor"'),
        ({"protection": "aor"}, "expected none, arc"),
        ({"protection": "aec+aor", "interval_steps": 2}, "the gradients of every step"),
        ({"copies": 0}, '"protection": "none"'),
        ({"protection": "auto", "copies": 2}, 'write "tolerance"'),
        (
            {"protection": "auto+aor", "copies": 2},
            '"protection": "auto+aor" chooses the number of copies',
        ),
        ({"protection": "auto+aor", "interval_steps": 2}, "the gradients of every step"),
        ({"protection": "automatic"}, "found protection 'automatic'"),
        ({"protection": {"scheme": "rs"}}, '"parities": 2'),
        ({"protection": {"scheme": "rs:2"}}, 'together with "copies" and "parities"'),
        ({"protection": {"copies": 2}}, '"scheme" is missing; write one of none, auto, arc'),
        ({"protection": {"sheme": "rs"}}, 'did you mean "scheme"'),
        ({"protection": {"scheme": "aec", "parities": 2}}, 'write "scheme": "rs"'),
        ({"protection": {"scheme": "arc+aec", "parities": 2}}, 'write "scheme": "arc+rs"'),
        ({"protection": {"scheme": "aec", "copies": 2}}, 'write "scheme": "arc+aec"'),
        ({"protection": {"scheme": "auto", "copies": 2}}, 'write "tolerance" next to "protection"'),
        ({"protection": {"scheme": "arc", "copies": True}}, "write a whole number from 1 to 99"),
        ({"protection": {"scheme": "arc", "recompute": "yes"}}, "write true or false"),
        ({"protection": {"scheme": "none", "recompute": True}}, '"aec+aor"'),
        ({"protection": {"scheme": "arc", "copies": 1}, "copies": 2}, 'remove "copies"'),
        ({"protection": ["rs", 2]}, "valid string"),
        ({"tolerance": -1}, "greater than or equal to 0"),
        ({"arenas": 1}, "greater than or equal to 2"),
        ({"block_bytes": 5000}, "write a multiple of 4096, for example 4096"),
        ({"copies": "many"}, "found 'many'"),
        ({"job_id": "a/b"}, "job_id"),
        ({"faults": [{"point": "never", "step": 1}]}, "before_copy"),
        (
            {"variant": "fastest"},
            "'has', 'host', 'host_device', 'blocking', 'inter_node' or 'none'",
        ),
        ({"variant": "host", "has": {"windows": "paper"}}, 'remove it, or write "variant": "has"'),
        ({"variant": "none", "persist": {"dir": "/x"}}, "nothing to persist"),
        ({"has": {"chunk_bytes": 5000}}, "write a multiple of 64, for example 4992"),
        ({"has": {"window": "paper"}}, 'did you mean "windows"'),
        ({"has": {"overflow": "drop"}}, "'auto', 'stall', 'interval' or 'staging'"),
    ],
)
def test_bad_blocks_are_refused_with_a_message_that_helps(block: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    assert said in str(caught.value)
    assert "reft config --explain" in str(caught.value)


def test_a_protection_can_be_chosen_with_recomputing_and_without() -> None:
    without, with_aor = (parse_block({"protection": text}) for text in ("auto", "auto+aor"))
    assert (without.chooses, without.recompute) == (True, False)
    assert (with_aor.chooses, with_aor.recompute) == (True, True)
    assert not parse_block({"protection": "aec+aor"}).chooses
    block = {"protection": "auto+aor", "tolerance": 2}
    assert parse_block(block).as_block() == block
    chosen = parse_block(block).model_copy(update={"protection": "rs:2+aor"})
    assert parse_block(chosen.as_block()) == chosen


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"scheme": "none"}, "none"),
        ({"scheme": "arc"}, "arc"),
        ({"scheme": "arc", "copies": 2}, "arc:2"),
        ({"scheme": "aec", "recompute": False}, "aec"),
        ({"scheme": "rs", "parities": 2, "recompute": True}, "rs:2+aor"),
        ({"scheme": "arc+aec", "recompute": True}, "arc+aec+aor"),
        ({"scheme": "arc+rs", "copies": 2, "parities": 3}, "arc:2+rs:3"),
        ({"scheme": "auto", "recompute": True}, "auto+aor"),
    ],
)
def test_a_protection_may_be_a_mapping(mapping: dict, text: str) -> None:
    config = parse_block({"protection": mapping})
    assert config == parse_block({"protection": text})
    assert parse_block(json.loads(json.dumps(config.as_block()))) == config
    assert config.recompute == mapping.get("recompute", False)
    if not config.chooses:
        assert config.scheme.copies == mapping.get("copies", int("arc" in text))
        assert config.scheme.parities == mapping.get("parities", int("aec" in text))


def test_one_copy_may_be_written_as_a_number() -> None:
    assert (
        parse_block({"protection": {"scheme": "arc", "copies": 1}}).scheme == parse_block({}).scheme
    )


def test_a_block_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match='"enabled": true'):
        load_config({"reft": True})


def test_the_environment_names_memory_and_job() -> None:
    config = parse_block({}, {"REFT_MEMORY_DIR": "/mem", "TORCHELASTIC_RUN_ID": "run7"})
    assert str(config.job_memory_dir) == "/mem/run7"
    assert str(os.geteuid()) in parse_block({}, {}).memory_dir.name, (
        "P11: the default one is the user's own"
    )
    assert parse_block({"job_id": "mine"}, {"TORCHELASTIC_RUN_ID": "other"}).job_id == "mine"
    # The launcher and its daemon already use this name.
    assert parse_block({"job_id": "mine"}, {"REFT_JOB_ID": "other"}).job_id == "other"


def test_persisting_gets_an_arena_of_its_own() -> None:
    assert parse_block({}).arena_count == 2
    assert parse_block({"persist": {"dir": "/x"}}).arena_count == 3
    assert parse_block({"arenas": 2, "persist": {"dir": "/x"}}).arena_count == 2


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)
    named = {k["key"] for k in keys}
    assert named >= {"enabled", "variant", "has.windows", "persist.dir"}
    assert not any(key.startswith("faults") for key in named), "those are for tests"
    assert all(k["meaning"] for k in keys)
    assert next(k for k in explain() if k.key.endswith("_secs")).unit == "seconds"
    assert main(["config", "--explain"]) == 0
    assert "node_mtbf_days" in capsys.readouterr().out


def test_config_check(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"reft": {"enabled": true}}')
    bad.write_text('{"reft": {"enabledd": true}}')
    assert main(["config", "--check", str(good)]) == 0
    assert main(["config", "--check", str(bad)]) == 2
    assert "did you mean" in capsys.readouterr().err


UUID = "123e4567-e89b-42d3-a456-426614174000"


@given(st.text(max_size=300))
def test_p7_any_text_gives_a_usable_name(text: str) -> None:
    name = safe_name(text)
    assert is_name(name)
    assert len(name) <= 128
    assert is_name(text) == (name == text)


@given(st.text(max_size=20), st.text(max_size=20))
def test_p7_two_texts_give_two_names(one: str, other: str) -> None:
    assert (one == other) == (safe_name(one) == safe_name(other))


def test_p7_a_name_is_of_directory_program_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to("train.py")
    name = own_name("train.py", ["--lr", "1"])
    assert name.startswith("train-")
    assert is_name(name)
    assert name == own_name(os.path.abspath("train.py"), ["--lr", "1"])
    assert name.rpartition("-")[0] == own_name("link.py", ["--lr", "1"]).rpartition("-")[0].replace(
        "link", "train"
    )
    others = [
        own_name("train.py", ["--lr", "2"]),
        own_name("train.py", ["--lr 1"]),
        own_name("other.py", ["--lr", "1"]),
        own_name("train", ["--lr", "1"], module=True),
    ]
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    others.append(own_name("../train.py", ["--lr", "1"]))
    assert len({name, *others}) == 6


@pytest.mark.parametrize(
    ("run_id", "nodes", "expected"),
    [
        ("", 2, None),
        ("none", 2, None),
        ("job7", 1, "job7"),
        (UUID, 1, None),  # torchrun --standalone
        (UUID, 2, UUID),
    ],
)
def test_p7_a_run_id_names_a_job_unless_it_is_nobodys(
    run_id: str, nodes: int, expected: str | None
) -> None:
    environ = {"TORCHELASTIC_RUN_ID": run_id, "GROUP_WORLD_SIZE": str(nodes)}
    assert make_run_name(environ) == expected
    assert make_run_name({}) is None


def test_p10_a_run_id_with_other_characters_is_no_error() -> None:
    assert parse_block({}, {"TORCHELASTIC_RUN_ID": "run 7/a"}).job_id == safe_name("run 7/a")
    assert parse_block({}, {"TORCHELASTIC_RUN_ID": ".."}).job_id == safe_name("..")


def test_p12_what_the_same_program_left_under_other_arguments_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, other = own_name("train.py", ["--lr", "2"]), own_name("train.py", ["--lr", "1"])
    JobDir.open_or_create(tmp_path, "another", "n0")
    log_sibling_jobs(tmp_path, name)
    assert caplog.text == ""
    JobDir.open_or_create(tmp_path, other, "n0")
    log_sibling_jobs(tmp_path, name)
    assert other in caplog.text
    caplog.clear()
    JobDir.open_or_create(tmp_path, name, "n0")
    log_sibling_jobs(tmp_path, name)
    assert caplog.text == ""


def test_a_preset_is_what_the_block_does_not_say() -> None:
    assert not parse_block({"preset": "short"}).enabled
    middle = parse_block({"preset": "middle", "protection": "aec"})
    assert (middle.enabled, middle.protection) == (True, "aec")
    long = parse_block({"preset": "long", "persist": {"dir": "/x", "keep": 5}})
    assert (long.enabled, long.protection) == (True, "auto")
    assert (long.persist.interval_steps, long.persist.keep) == ("auto", 5)
    assert parse_block(long.as_block()) == long
    with pytest.raises(ConfigError, match='needs "dir"'):
        parse_block({"preset": "long"})
    with pytest.raises(ConfigError, match="preset"):
        parse_block({"preset": "forever"})


def test_the_page_has_what_each_preset_sets() -> None:
    page = (Path(__file__).parents[1] / "docs" / "planning.md").read_text()
    for name, settings in PRESETS.items():
        [row] = [line for line in page.splitlines() if f'| `"{name}"`' in line]
        assert json.dumps(settings)[1:-1] in row
