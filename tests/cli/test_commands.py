"""What all sub-commands share: they are imported when used, and have one manner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import reft
from reft import cli
from reft.cli import EXIT_NOT_WELL, EXIT_WELL, EXIT_WRONG_USE, find_commands
from reft.config import explain
from reft.job.node_memory import NodeMemory
from reft.memory.jobdir import CONFIG_FILE, DAEMON_FILE, JobDir, process_identity, write_json
from reft.node.advice import SpeedSample, situation
from reft.node.history import ENDED, HISTORY_FILE, RESUMED, STARTED, STEPPED, note
from reft.node.progress import ProgressPage
from reft.node.report import BOARD_FILE, ENDED_WELL, NodeReport, ReportBoard, read_board
from tests.commands import Answer, command
from tests.machine import can_give_away

HEAVY = ("torch", "deepspeed", "matplotlib", "numpy", "pydantic", "rich", "psutil")
COUNT = f"""
import json, sys
from reft import cli
code = cli.main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
EVERY = [[name] for name in find_commands()]


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["plan", "--version"]])
def test_help_and_version_import_no_more_than_the_parser(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_the_public_names_are_listed_although_they_are_imported_on_first_use() -> None:
    assert set(reft.__all__) <= set(dir(reft))


@pytest.mark.parametrize("words", [[], *EVERY], ids=" ".join)
def test_all_help_is_in_one_style(words: list[str]) -> None:
    """Options are described in lower case, under a title in title case, whichever parser prints them."""
    lines = command(*words, "--help").out.splitlines()
    assert "Options:" in lines
    described = [re.match(r"  -.*?  +(\w+)", line) for line in lines]
    assert [m[1] for m in described if m and m[1] in ("Show", "Install")] == []


@pytest.mark.parametrize("name", ["profile", "replay"])
def test_help_of_what_launches_a_job_leaves_launchs_options_out(name: str) -> None:
    brief = command(name, "--help").out
    assert len(brief.splitlines()) < 60
    assert "--help-all" in brief
    assert "--memory-dir" not in brief


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_has_help(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, option]) == cli.EXIT_WELL
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: reft {' '.join(command)} [OPTIONS]")
    assert "-h, --help" in out


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_an_unknown_option_is_told_in_one_form(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--nonsense"]) == cli.EXIT_WRONG_USE
    usage, hint, empty, error, *more = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"Usage: reft {' '.join(command)} [OPTIONS]")
    assert hint == f"Try 'reft {' '.join(command)} -h' for help."
    assert (empty, error.partition(" ")[0], more) == ("", "Error:", [])


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_keys_are_read_at_80_columns_and_through_a_pipe(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["config", "--explain"]) == cli.EXIT_WELL
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    for key in explain():
        assert any(key.key in line for line in lines), key


@pytest.mark.parametrize(
    "arguments",
    [
        "profile --from p.json --figure",
        "profile --from p.json --trace",
        "profile --from p.json --json",
        "profile --figure",
    ],
)
def test_no_folder_is_made_for_a_file(
    arguments: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    Path("p.json").write_text("{}")
    rest = ["train.py"] if arguments == "profile --figure" else []
    assert cli.main([*arguments.split(), "folder/below/a.png", *rest]) == cli.EXIT_WRONG_USE
    assert "there is no folder folder/below" in " ".join(capsys.readouterr().err.split())
    assert not Path("folder").exists()


FILES = {
    "broken.json": b"{ not json",
    "list.json": b"[1, 2]",
    "null.json": b"null",
    "bytes.json": bytes(range(256)),
    "deep.json": b"[" * 100_000,
    "block.json": json.dumps({"reft": 5}).encode(),
    "key.json": json.dumps({"reft": {"enabledd": True}}).encode(),
    "ds.json": json.dumps({"train_batch_size": 8, "reft": {"enabled": True}}).encode(),
    "plain.json": json.dumps({"train_batch_size": 8}).encode(),
    "script.py": b"raise SystemExit(3)",
}
PLAN = "plan ds.json --model 1.3b --dp 4"
UNREADABLE = ("nofile.json", "broken.json", "list.json", "bytes.json", "deep.json")

CASES = [
    "nonsense",
    "--nonsense",
    "version --nonsense",
    "config",
    *(
        f"config --check {name}"
        for name in (*UNREADABLE, "null.json", "plain.json", "block.json", "key.json", "directory")
    ),
    *(
        f"launch {options} script.py"
        for options in (
            "--nproc-per-node -3",
            "--nproc-per-node 0",
            "--nproc-per-node abc",
            "--nnodes 0",
            "--nnodes -1",
            "--nnodes 0 --rdzv-endpoint localhost:1",
            "--nnodes 3:1",
            "--nnodes a:b",
            "--node-rank -4",
            "--master-port 99999",
            "--master-port -1",
            "--monitor-interval nan",
            "--grace-secs nan",
            "--max-peer-restarts -1",
            "--rdzv-conf nonsense",
            "--rdzv-conf join_timeout=abc",
            "--rdzv-conf timeout=-1",
            "--rdzv-conf keep_alive_interval=0",
            "--local-ranks-filter x",
            "--tee 9",
            "--log-dir file/below",
            "--nonsense",
        )
    ),
    *(
        f"config --script {name}"
        for name in ("nofile.py", "broken.json", "bytes.json", "directory")
    ),
    "launch",
    "profile",
    "profile --nproc-per-node -3 script.py",
    "profile --steps -1 script.py",
    *(f"profile --from {name}" for name in (*UNREADABLE, "null.json", "block.json", "directory")),
    "rendezvous --port 99999",
    "rendezvous --port abc",
    "rendezvous --host nonsense.invalid",
    "demo --nodes 0",
    "demo --steps -1",
    "demo --kill abc",
    "demo --kill 99:99",
    "demo --protection nonsense",
    *(
        f"{command} --memory-dir nofile"
        for command in ("inspect", "verify", "clean", "status", "persist --out out", "protect arc")
    ),
    "persist",
    "persist --out out --keep 0",
    "clean --nonsense",
    "plan",
    "plan ds.json",
    *(f"plan {name} --model 34b --dp 4" for name in UNREADABLE),
    *(f"{PLAN} --model {name}" for name in UNREADABLE),
    *(f"{PLAN} --cluster {name}" for name in UNREADABLE),
    *(f"{PLAN} --profile {name}" for name in UNREADABLE),
    *(
        f"{PLAN} {options}"
        for options in (
            "--pp 0",
            "--tp 7",
            "--tolerance -1",
            "--host-memory-gb nan",
            "--host-memory-gb inf",
            "--parameters nan",
            "--parameters 7X",
            "--max-overhead nan",
        )
    ),
    "plan --print-cluster nonsense",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REFT_MEMORY_DIR", str(tmp_path / "memory"))
    return tmp_path


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_wrong_use_is_told_and_ends_with_code_2(
    folder: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(case.split())
    except SystemExit as stop:  # argparse has told
        code = stop.code
    out, err = capfd.readouterr()
    assert code == 2, (out, err)
    assert "Traceback" not in out + err
    assert err.strip()


FACTS: dict[str, Any] = {
    "round": 1,
    "nodes": ["a"],
    "failures": [],
    "lost": [],
    "joined": [],
    "newest_step": -1,
}


def ended(tmp_path: Path, *, reason: str | None = None) -> JobDir:
    job = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32)
    if reason is not None:
        note(job.path, STARTED, **FACTS)
        note(job.path, ENDED, reason=reason)
    return job


def running(tmp_path: Path, *nodes: str, **facts: object) -> JobDir:
    job = ended(tmp_path)
    write_json(job.path / DAEMON_FILE, process_identity(os.getpid()))
    reports = tuple(NodeReport(node=n, domain=n, step=3, steps_per_sec=2.5) for n in nodes)
    board = ReportBoard(job_id="job", nodes=reports, written_unix_secs=time.time()).model_copy(
        update=facts
    )
    write_json(job.path / BOARD_FILE, board.model_dump(mode="json"))
    return job


def ask(tmp_path: Path, *options: str) -> list[str]:
    return ["status", "--memory-dir", str(tmp_path / "memory"), *options]


def asked(tmp_path: Path, *options: str) -> Answer:
    return command(*ask(tmp_path, *options))


@pytest.mark.parametrize("there", [False, True])
def test_without_memory_or_daemon_it_is_json_too(tmp_path: Path, there: bool) -> None:
    (tmp_path / "memory").mkdir()
    if there:
        path = ended(tmp_path).path
        for file in ("status.json", "daemon.json", "protection.json"):
            (path / file).write_text("{ torn")
    answer = asked(tmp_path, "--json")
    assert answer.code == EXIT_NOT_WELL
    told = answer.json
    if there:
        (node,) = told["here"]
        assert (told["job_id"], told["state"], told["ended"]) == (
            "job",
            "ended",
            "its processes are gone",
        )
        assert (node["daemon_runs"], node["status"], node["protection"]) == (False, None, None)
    else:
        assert (told["job_id"], told["nodes"], told["here"]) == (None, [], [])
        assert told["problem"] in answer.err
        assert "no job has memory in" in answer.err


def test_commits_that_a_restart_did_not_find_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = ended(tmp_path).path
    note(path, STARTED, gathering_secs=None, **FACTS)
    for step in (9, 6):
        again = FACTS | {"round": 2, "lost": ["b"], "newest_step": 9}
        note(path, STARTED, gathering_secs=None, **again)
        note(path, RESUMED, source="disk, /d", step=step, secs=0.5)
    answer = command("history", "--memory-dir", tmp_path / "memory")
    assert answer.code == EXIT_WELL
    assert "step 6 (disk, /d); 3 committed steps were lost" in answer.out
    assert answer.out.count("were lost") == 1


@pytest.mark.parametrize("event", [STARTED, RESUMED, STEPPED, ENDED])
@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"source": "memory", "step": "three", "secs": 0.5},
        FACTS | {"reason": ["a"], "nodes": "a", "newest_step": 0},
        {
            "unix_secs": float("inf"),
            "reason": "r",
            "round": 1,
            "source": "memory",
            "step": 1,
            "secs": 1.0,
        },
        {"unix_secs": 1e300, "reason": "r", "round": 1, "source": "memory", "step": 1, "secs": 1.0},
    ],
)
def test_an_event_that_lacks_fields_is_left_out_of_the_history(
    tmp_path: Path, event: str, wrong: dict[str, object]
) -> None:
    """Another release, or a full disk, may have written what this one does not understand."""
    path = ended(tmp_path).path
    note(path, STARTED, gathering_secs=None, **FACTS)
    said = []
    for lines in (
        "",
        json.dumps({"event": event, "unix_secs": 1.0, **wrong}),
        '[1]\n"x"\n{"event": [1], "unix_secs": 2.0}',
    ):
        with (path / HISTORY_FILE).open("a") as file:
            file.write(f"{lines}\n")
        history = command("history", "--memory-dir", tmp_path / "memory")
        assert history.code == EXIT_WELL
        said.append(history.out)
        assert asked(tmp_path).code == EXIT_NOT_WELL
    if event != STEPPED:  # it has nothing but its time
        assert said == said[:1] * 3


def recovering(
    tmp_path: Path, doing: str, *, gone: bool = False, **of_history: object
) -> dict[str, Any]:
    """What is told of a job of two nodes, a and b, whose second start follows the loss of b."""
    job = running(tmp_path)
    for number, lost in ((1, []), (2, ["b"])):
        note(
            job.path,
            STARTED,
            **FACTS | {"round": number, "nodes": ["a", "b"], "lost": lost} | of_history,
        )
    since = {"doing": doing, "doing_since_unix_secs": time.time() - (7 if gone else 0.5)}
    nodes = [
        NodeReport(node="a", domain="a", round=2, **since),
        NodeReport(
            node="b",
            domain="b",
            round=1,
            offline_unix_secs=time.time() if gone else None,
            doing="running",
        ),
    ]
    running(tmp_path, nodes=[node.model_dump(mode="json") for node in nodes])
    told: dict[str, Any] = asked(tmp_path, "--json").json
    return told


def test_a_job_that_waits_for_a_node_says_for_which_since_when_and_until_when(
    tmp_path: Path,
) -> None:
    told = recovering(tmp_path, "waiting for nodes", gone=True)
    assert (told["state"], told["waiting"]["for"]) == ("waiting for a node", ["b"])
    assert 6 <= time.time() - told["waiting"]["since_unix_secs"] < 60
    assert told["waiting"]["until_unix_secs"] is None
    write_json(ended(tmp_path).path / CONFIG_FILE, {"elastic": {"wait_secs": 60}})
    answer = asked(tmp_path, "--json")
    waiting = answer.json["waiting"]
    assert waiting["until_unix_secs"] == waiting["since_unix_secs"] + 60
    assert answer.code == EXIT_NOT_WELL


def test_a_job_that_recovers_says_so_until_it_trains(tmp_path: Path) -> None:
    assert recovering(tmp_path, "a trainer has failed")["state"] == "recovering"
    assert recovering(tmp_path, "waiting for nodes")["state"] == "recovering"
    assert recovering(tmp_path, "running")["state"] == "recovering"
    path = ended(tmp_path).path
    page = ProgressPage(path, 0, 0, 10.0, 600.0)
    assert asked(tmp_path, "--json").json["state"] == "recovering"
    page.begin_step()
    page.end_step(9)
    assert asked(tmp_path, "--json").json["state"] == "runs"
    page.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node eight", "--nproc-per-node is 'eight'; write a number such as 8"),
        ("--nnodes 3:2", "--nnodes is 3:2, whose minimum is above its maximum; write 2:3"),
        ("--spares -1", "--spares is -1; write 0 or more"),
        ("--memory-dir /proc/x", "--memory-dir /proc/x cannot be used: No such file or directory"),
        ("--memory-dir FILE/x", "train.py/x cannot be used: "),
    ],
)
def test_a_launch_that_cannot_be_meant_is_refused_with_what_to_write(
    tmp_path: Path, options: str, said: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    words = options.replace("FILE", str(script)).split()
    place = [] if "--memory-dir" in words else ["--memory-dir", tmp_path / "memory"]
    answer = command("launch", *place, *words, script)
    assert answer.code == EXIT_WRONG_USE, answer.err
    assert said in " ".join(answer.err.split())


@pytest.mark.parametrize("words", ["inspect", "verify", "persist --out out"])
def test_a_stored_job_that_is_not_there_is_named(words: str, tmp_path: Path) -> None:
    answer = command(*words.split(), "--from", tmp_path / "nothere")
    assert answer.code == EXIT_WRONG_USE
    assert f"--from {tmp_path / 'nothere'}: no such directory" in " ".join(answer.err.split())


def test_a_replay_without_memory_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.chdir(tmp_path)
    for folder in ("none", "."):
        answer = command("replay", "--memory-dir", tmp_path / folder, script)
        assert answer.code == EXIT_WRONG_USE
        assert (
            "a replay needs the memory that the job left: start the job with --keep-memory"
            in answer.err
        )


def test_a_model_that_is_not_known_is_told_with_what_to_give_instead(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    answer = command("plan", tmp_path / "ds.json", "--model", "llama3-70b", "--dp", "4")
    assert answer.code == EXIT_WRONG_USE
    said = " ".join(answer.err.split())
    assert "no model named 'llama3-70b'" in said
    assert "config.json" in said
    assert "--parameters" in said


def test_a_check_where_nothing_listens_says_so_once() -> None:
    answer = command("check", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:9", "--secs", "0.1")
    assert answer.code == EXIT_NOT_WELL
    assert answer.err.count("does not answer") == 1
    assert "reft rendezvous" in answer.err


def test_the_address_of_a_page_whose_port_is_taken(tmp_path: Path) -> None:
    job = running(tmp_path, "a")
    write_json(
        job.path / "status.json", {"web": None, "web_problem": "127.0.0.1 port 9095: in use"}
    )
    answer = asked(tmp_path, "--web")
    assert answer.code == EXIT_NOT_WELL
    assert "127.0.0.1 port 9095: in use" in answer.err
    assert "9095}" not in answer.err


def ended_well(
    tmp_path: Path, log_dir: Path | None = None, *, persist: bool = True, has_block: bool = True
) -> None:
    """A job of one node that was started twice, and whose memory is removed as at a good end."""
    memory = NodeMemory(tmp_path / "memory", "job", "a")
    memory.prepare(b"s" * 32)
    for number in (1, 2):
        note(
            memory.path,
            STARTED,
            **FACTS | {"round": number, "failures": ["rank 0 was killed"] * (number - 1)},
        )
    if has_block:
        block = {"persist": {"dir": str(tmp_path / "persisted")}} if persist else {}
        write_json(memory.path / CONFIG_FILE, block)
    memory.remove(log_dir)
    assert not memory.path.exists()


@pytest.mark.parametrize("kept_in", ["persisted/job", "logs"])
def test_the_history_of_a_job_that_ended_well_is_kept(tmp_path: Path, kept_in: str) -> None:
    (tmp_path / "persisted").mkdir()
    (tmp_path / "logs").mkdir()
    persist, log_dir = kept_in != "logs", tmp_path / "logs"
    for starts in (2, 4):  # the second job has the same name
        ended_well(tmp_path, log_dir, persist=persist)
        answer = command("history", "--from", tmp_path / kept_in, "--json")
        assert answer.code == EXIT_WELL, answer.err
        (node,) = answer.json
        assert (node["job_id"], node["node"], len(node["rounds"])) == ("job", "a", starts)
    assert "rank 0 was killed" in command("history", "--from", tmp_path / kept_in).out
    gone = command("history", "--memory-dir", tmp_path / "memory")
    assert gone.code == EXIT_NOT_WELL
    assert "reft history --from" in gone.err


def test_a_history_that_is_not_there_or_torn_is_no_traceback(tmp_path: Path) -> None:
    assert command("history", "--from", tmp_path).code == EXIT_NOT_WELL
    (tmp_path / "persisted").mkdir()
    ended_well(tmp_path)
    (kept,) = (tmp_path / "persisted" / "job").glob("history-*.jsonl")
    kept.write_text(kept.read_text() + '{"node": 5}\n[1]\n{"torn')
    (node,) = command("history", "--from", tmp_path / "persisted" / "job", "--json").json
    assert len(node["rounds"]) == 2


def test_p10_a_job_without_a_block_leaves_no_history(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ended_well(tmp_path, tmp_path / "logs", has_block=False)
    assert [*(tmp_path / "logs").iterdir()] == []


def test_p6_a_directory_that_cannot_be_written_costs_the_history_alone(tmp_path: Path) -> None:
    ended_well(tmp_path)  # there is no directory tmp_path / "persisted"
    assert not (tmp_path / "persisted").exists()


def test_the_address_of_the_web_page_or_what_to_write(tmp_path: Path) -> None:
    job = running(tmp_path, "a")
    answer = asked(tmp_path, "--web")
    assert answer.code == EXIT_WRONG_USE
    assert '"metrics": {"port": 9095}' in answer.err
    write_json(job.path / "status.json", {"web": "http://127.0.0.1:9095/"})
    assert asked(tmp_path, "--web") == (EXIT_WELL, "http://127.0.0.1:9095/\n", "")


def test_a_launcher_that_is_silent_or_cut_off_is_warned_of(tmp_path: Path) -> None:
    running(tmp_path, "a", written_unix_secs=time.time() - 60)
    assert "reported nothing for 60 s" in asked(tmp_path, "--json").json["warnings"][0]
    running(tmp_path, "a", store_lost_unix_secs=time.time())
    assert "has not reached the rendezvous store" in asked(tmp_path, "--json").json["warnings"][0]


@pytest.mark.parametrize("board", [b"", b"{}", b'{"job_id": 5, "nodes": [{}]}', b"[" * 100_000])
def test_p6_a_board_that_is_none_is_left_out(tmp_path: Path, board: bytes) -> None:
    job = running(tmp_path, "a")
    (job.path / BOARD_FILE).write_bytes(board)
    told = asked(tmp_path, "--json").json
    assert [n["node"] for n in told["nodes"]] == ["a"]
    assert "no reft launcher reports on other nodes" in told["warnings"][0]


def test_a_job_that_has_ended_says_why(tmp_path: Path) -> None:
    ended(tmp_path, reason="a bad sample")
    for options in ([], ["--watch"]):
        answer = asked(tmp_path, *options)
        assert answer.code == EXIT_NOT_WELL
        assert "does not run: a bad sample" in answer.out
    answer = asked(tmp_path, "--watch", "--json")
    assert (answer.code, answer.json["ended"]) == (EXIT_NOT_WELL, "a bad sample")
    assert len(answer.out.splitlines()) == 1


@pytest.mark.skipif(not can_give_away(65534), reason="files cannot be given to another user here")
@pytest.mark.parametrize("whole", [True, False], ids=["its memory", "the directory alone"])
def test_p11_another_users_job_is_told_to_be_theirs(tmp_path: Path, whole: bool) -> None:
    job = ended(tmp_path) if whole else None
    (tmp_path / "memory").mkdir(exist_ok=True)
    for path in (tmp_path / "memory", *([job.path] if job else [])):
        os.chown(path, 65534, -1)
    answer = asked(tmp_path)
    assert answer.code == EXIT_NOT_WELL
    said = "belongs to uid 65534" if whole else "no job has memory in"
    assert said in " ".join(answer.err.split())


@pytest.mark.process
def test_watching_through_a_pipe_prints_until_interrupted(tmp_path: Path) -> None:
    running(tmp_path, "a", "b")
    words = [sys.executable, "-m", "reft.cli", *ask(tmp_path, "--watch", "--interval", "0.1")]
    for options in ([], ["--json"]):
        with subprocess.Popen(
            [*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as watch:
            assert watch.stdout is not None
            assert watch.stderr is not None
            if options:
                seen = [json.loads(watch.stdout.readline()) for _ in range(2)]
                assert [len(told["nodes"]) for told in seen] == [2, 2]
            else:
                line = ""
                # On a busy machine the nodes' reports are old by the time they are read.
                while "steps/s" not in line and "silent" not in line:
                    line = watch.stdout.readline()
                    assert watch.poll() is None
            watch.send_signal(2)
            watch.stdout.read()
            assert "Traceback" not in watch.stderr.read()
        assert watch.returncode == EXIT_NOT_WELL


def test_watching_a_job_that_ends_well_is_well_before_its_memory_is_removed_too(
    tmp_path: Path,
) -> None:
    job = ended(tmp_path)
    report = NodeReport(node=job.node, domain="a", left=True, why=ENDED_WELL)
    board = ReportBoard(job_id="job", nodes=(report,))
    write_json(job.path / BOARD_FILE, board.model_dump(mode="json"))
    answer = asked(tmp_path, "--watch", "--json")
    assert (answer.code, answer.json["ended"]) == (EXIT_WELL, "it ended well")


@pytest.mark.process
def test_watching_ends_with_the_job(tmp_path: Path) -> None:
    job = running(tmp_path, "a")
    words = [
        sys.executable,
        "-m",
        "reft.cli",
        *ask(tmp_path, "--watch", "--json", "--interval", "0.1"),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["state"] == "runs"
        for path in job.path.iterdir():
            path.unlink()
        time.sleep(0.5)  # it is looked at meanwhile
        job.path.rmdir()
        last = json.loads(watch.stdout.read().splitlines()[-1])
        assert (last["state"], last["ended"]) == (
            "ended",
            "it ended well, and its memory was removed",
        )
    assert watch.returncode == EXIT_WELL


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three nodes and a spare; it began with two, and one is lost again and again."""
    path = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32).path
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for nodes, newest, lost in (
        ("ab", -1, ""),
        ("abc", 150, ""),
        ("abc", 300, "c"),
        ("abc", 320, "c"),
        ("abc", 330, "c"),
    ):
        facts: dict[str, Any] = {
            "round": 1,
            "nodes": list(nodes),
            "lost": list(lost),
            "newest_step": newest,
        }
        note(path, STARTED, failures=[], joined=[], **facts)
        now[0] += 20.0
        note(path, RESUMED, source="memory", step=max(newest, 0), secs=20.0, times={})
        now[0] += 100.0
    monkeypatch.undo()
    nodes = [NodeReport(node=n, domain=n, steps_per_sec=1.9) for n in "abc"]
    nodes.append(NodeReport(node="s", domain="s", spare=True))
    board = ReportBoard(job_id="job", nodes=tuple(nodes), written_unix_secs=time.time())
    write_json(path / BOARD_FILE, board.model_dump(mode="json"))
    return path


def advised(job: Path, *options: str) -> Answer:
    answer = command("advise", "--memory-dir", job.parent, *options)
    assert answer.code == EXIT_WELL
    return answer


def test_what_the_nodes_have_noted_is_understood(job: Path) -> None:
    seen = situation([job], read_board(job), 4)
    assert (seen.nodes, seen.spares) == (("a", "b", "c"), ("s",))
    assert seen.losses == {"c": 3}
    # 150 steps with two nodes in 120 s, of which training takes what the start left; then as told now.
    assert [speed.workers for speed in seen.speeds] == [2, 3, 3]
    assert 150 / 120 <= seen.speeds[0].per_sec <= 150 / 99
    assert seen.speeds[-1] == SpeedSample(3, 1.9)
    assert seen.memory[0].node == "a"


def test_it_is_told_to_people_as_json_and_as_yaml(job: Path) -> None:
    assert "replace c: it was lost 3 times, of 3 in all" in advised(job).out
    assert "add to 4 nodes" in advised(job, "--max-nodes", "4").out
    found = advised(job, "--json", "--max-nodes", "4").json
    assert [a["action"] for a in found["advice"] if a["action"] != "memory"] == ["replace", "add"]
    spec = found["scale_plan"]["spec"]
    assert spec["removePods"] == [{"name": "c", "type": "worker"}]
    assert spec["replicaResourceSpecs"]["worker"]["replicas"] == 4
    assert advised(job, "--yaml", "--max-nodes", "4").json == found["scale_plan"]


def test_stragglers_that_the_job_names_are_replaced(job: Path) -> None:
    board = read_board(job)
    assert board is not None
    slow = {
        **{"kind": "node", "name": "node b", "ranks": (1,), "nodes": ("b",), "since_step": 3},
        **{"factor": 1.5, "cost_secs": 0.1, "cost_share": 0.3, "why": "it computes"},
    }
    write_json(job / BOARD_FILE, board.model_dump(mode="json") | {"slow": [slow]})
    said = (
        "replace b: node b takes 1.50 times as long as its peers (it computes); spare s is waiting"
    )
    assert said in advised(job).out
