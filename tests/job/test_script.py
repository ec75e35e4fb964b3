"""`python -m reft.job.script` runs a script as python would, and installs reft when DeepSpeed is imported."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from reft.engine.on_import import PostImportFinder
from reft.errors import (
    AuthenticationError,
    ConfigError,
    JobInUseError,
    SizeError,
    TransferError,
    UnrecoverableError,
)
from reft.job.script import (
    ExitCause,
    ExitNote,
    TrainerFailure,
    WorkerExit,
    is_peer_failure,
    judge,
    name_ended_early,
    shell_code,
)

ROOT = Path(__file__).resolve().parents[2]

FACTS = """
import json, os, sys, __main__
facts = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": [os.path.abspath(sys.path[0]), *sys.path[1:]],
    "main_is_here": __main__.__dict__ is globals(), "spec": getattr(__spec__, "name", None),
    "package": __package__, "heavy": sorted({"torch", "deepspeed", "numpy"} & set(sys.modules)),
}
print(json.dumps(facts))
"""


def run(*args: str, cwd: Path, auto: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    python_path = os.pathsep.join(p for p in (str(ROOT), env.pop("PYTHONPATH", "")) if p)
    prefix = ("-P", "-m", "reft.job.script") if auto else ()
    return subprocess.run(
        [sys.executable, *prefix, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path, **env},
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )


@pytest.mark.process
@pytest.mark.parametrize("kind", ["script", "module", "package", "directory"])
def test_a_program_sees_what_it_would_see_under_python(tmp_path: Path, kind: str) -> None:
    work = tmp_path / "work"
    package = work / "job"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(FACTS)
    for directory in (work, package):
        (directory / "logging.py").write_text("raise SystemExit('the user's logging.py')")
    target = {
        "script": ["job/train.py"],
        "module": ["-m", "job.train"],
        "package": ["-m", "job"],
        "directory": ["job"],
    }[kind]
    ours, theirs = (run(*target, "--a", "b c", cwd=work, auto=auto) for auto in (True, False))
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    seen, expected = json.loads(ours.stdout), json.loads(theirs.stdout)
    assert seen["heavy"] == []
    assert seen == expected


@pytest.mark.process
def test_a_script_imports_its_neighbours_unless_python_is_safe(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "train.py").write_text("import neighbour")
    assert run("train.py", cwd=Path("/")).returncode != 0, "there is none"
    for environ, code in (({}, 0), ({"PYTHONSAFEPATH": "1"}, 1)):
        done = [
            run(str(tmp_path / "train.py"), cwd=Path("/"), auto=auto, **environ)
            for auto in (True, False)
        ]
        assert [d.returncode for d in done] == [code, code]
        done = [run("-m", "train", cwd=tmp_path, auto=auto, **environ) for auto in (True, False)]
        assert [d.returncode != 0 for d in done] == [code != 0] * 2


@pytest.mark.process
def test_tracebacks_and_exit_codes_are_pythons_and_what_cannot_be_run_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('wrong')\n\nf()\n")
    (tmp_path / "syntax.py").write_text("x = = 1\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit('not today')\n")
    (tmp_path / "hook.py").write_text(
        "import sys\nsys.excepthook = lambda *a: print('HOOK', a[0].__name__)\nraise KeyError(1)\n"
    )
    for name in ("bad.py", "syntax.py", "leaves.py", "hook.py"):
        ours, theirs = (run(name, cwd=tmp_path, auto=auto) for auto in (True, False))
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        assert ours.stderr.replace(str(tmp_path) + "/", "") == theirs.stderr.replace(
            str(tmp_path) + "/", ""
        )
    for args in (["absent.py"], ["-m", "absent.module"], ["-m"], []):
        done = run(*args, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert len(done.stderr) > 20


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "exit_code", "cause"),
    [
        (
            "raise RuntimeError('[pair.cc:537] Read error: Connection reset by peer')",
            75,
            ExitCause.PEER,
        ),
        ("raise ValueError('own')", 1, ExitCause.OWN),
        ("import reft\nraise reft.ConfigError('write this')", 2, ExitCause.REFUSED),
        (
            "import sys\ntry:\n raise RuntimeError('Connection closed by peer [::1]')\n"
            "except Exception:\n sys.exit(9)",
            9,
            ExitCause.PEER,
        ),
        ("import sys; sys.exit(9)", 9, None),
        ("import os; os._exit(4)", 4, None),
        ("pass", 0, ExitCause.ENDED),
        ("import sys; sys.exit()", 0, ExitCause.ENDED),
    ],
)
def test_a_failure_is_noted_for_the_agent(
    tmp_path: Path, code: str, exit_code: int, cause: ExitCause | None
) -> None:
    (tmp_path / "t.py").write_text(code)
    error_file = tmp_path / "error.json"
    env = {
        "REFT_EXIT_DIR": str(tmp_path),
        "LOCAL_RANK": "2",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    done = run("t.py", cwd=tmp_path, **env)
    assert done.returncode == exit_code
    assert ("Traceback" in done.stderr) is (exit_code in (1, 75)), (
        "what is refused says itself what to change"
    )
    note = ExitNote.read(tmp_path, 2)
    assert (note.cause if note else None) is cause
    if exit_code in (1, 75):
        assert "py_callstack" in json.loads(error_file.read_text())["message"]["extraInfo"]
    elif exit_code == 2:
        # torchrun shows the message where there is no traceback.
        said = json.loads(error_file.read_text())["message"]
        assert said["message"].startswith("ConfigError: ")
        assert set(said["extraInfo"]) == {"timestamp"}


@pytest.mark.process
def test_a_script_that_ends_well_says_at_which_step(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "from pathlib import Path\nfrom reft.node.progress import open_page\n"
        "page = open_page(Path('.'), 2, 2, 0.0, 0.0)\npage.set_step(7)\npage.close()\n"
    )
    done = run("t.py", cwd=tmp_path, REFT_EXIT_DIR=str(tmp_path), LOCAL_RANK="2")
    assert done.returncode == 0, done.stderr
    assert ExitNote.read(tmp_path, 2) == ExitNote(ExitCause.ENDED, "exit code 0 at step 7")


def fake_packages(directory: Path, install: str) -> str:
    """A `deepspeed` that says when it is imported, and an `install` in place of the real one."""
    fake = directory / "fakes" / "deepspeed"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("print('deepspeed imported')\ninitialize = 'plain'\n")
    (fake / "pipe.py").write_text("import deepspeed\nprint('pipe sees', deepspeed.initialize)\n")
    (directory / "sitecustomize.py").write_text(
        f"import reft.engine.on_import as hook\nexec({install!r}, hook.__dict__)\n"
    )
    return os.pathsep.join([str(directory / "fakes"), str(directory)])


INSTALL = "def install():\n import deepspeed\n deepspeed.initialize = 'wrapped'\n print('reft installed')\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "statement", ["import deepspeed", "from deepspeed import pipe", "import deepspeed.pipe"]
)
def test_reft_is_installed_right_after_deepspeed(tmp_path: Path, statement: str) -> None:
    path = fake_packages(tmp_path, INSTALL)
    (tmp_path / "t.py").write_text(
        f"print('script')\n{statement}\nimport deepspeed\nprint(deepspeed.initialize)\n"
        "import importlib.resources as r; print(r.files('deepspeed').joinpath('pipe.py').is_file())\n"
    )
    done = run("t.py", cwd=tmp_path, PYTHONPATH=path)
    lines = done.stdout.split("\n")[:-1]
    assert lines[:3] == ["script", "deepspeed imported", "reft installed"], done.stderr
    assert lines[-2:] == ["wrapped", "True"]
    if "pipe" in statement:
        assert "pipe sees wrapped" in lines


def test_a_module_that_is_looked_for_first_is_hooked_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers and accelerate look for DeepSpeed."""
    (tmp_path / "wanted_module_of_this_test.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[bool] = []
    finder = PostImportFinder("wanted_module_of_this_test", lambda: calls.append(True))
    monkeypatch.setattr(sys, "meta_path", [finder, importlib.machinery.PathFinder])
    for _ in range(2):
        assert importlib.util.find_spec("wanted_module_of_this_test") is not None
    assert calls == []
    importlib.import_module("wanted_module_of_this_test")
    assert calls == [True]
    assert finder not in sys.meta_path


@pytest.mark.process
def test_a_hook_that_cannot_be_installed_does_not_stop_the_script(tmp_path: Path) -> None:
    """P10: the script may not even ask for reft."""
    path = fake_packages(tmp_path, "def install():\n raise AttributeError('unknown DeepSpeed')\n")
    (tmp_path / "t.py").write_text("import deepspeed\nprint(deepspeed.initialize)\n")
    done = run("t.py", cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "deepspeed imported\nplain\n")
    assert "UNPROTECTED" in done.stderr
    assert "unknown DeepSpeed" in done.stderr


@pytest.mark.process
def test_spawned_children_and_exit_handlers_find_main(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import atexit, multiprocessing, pickle, sys\n"
        "class Thing:\n    pass\n"
        "def square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with context.Pool(1) as pool:\n"
        "        print(pool.map(square, [1, 2, 3]))\n"
        "    atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Thing()))) is Thing))\n"
    )
    done = run("t.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1, 4, 9]\nTrue\n"), done.stderr


@pytest.mark.process
def test_exit_handlers_find_the_exception_that_ended_the_script(tmp_path: Path) -> None:
    """A version of a state that an exception left half changed is not taken at the end."""
    (tmp_path / "t.py").write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print(repr(sys.last_value)))\n"
        "raise ValueError('no such batch')\n"
    )
    for auto in (True, False):
        done = run("t.py", cwd=tmp_path, auto=auto)
        assert (done.returncode, done.stdout) == (1, "ValueError('no such batch')\n"), done.stderr


@pytest.mark.process
def test_a_trainer_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("print('ran')")
    done = run("t.py", cwd=tmp_path, REFT_LAUNCHER_PID="1")  # the launcher is gone already
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.process
@pytest.mark.parametrize(
    ("message", "torn_down"), [("Connection reset by peer", False), ("mine", True)]
)
def test_who_lost_a_peer_ends_in_good_order_but_does_not_take_the_interpreter_apart(
    tmp_path: Path, message: str, torn_down: bool
) -> None:
    (tmp_path / "t.py").write_text(
        "import atexit, os, sys, tempfile, threading, time\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        os.write(1, b'taken apart\\n')\n"
        "last = Last()\n"
        "folder = tempfile.TemporaryDirectory(dir='.')\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        f"raise RuntimeError({message!r})\n"
    )
    done = run("t.py", cwd=tmp_path)
    said = ["thread", "handler", *(["taken apart"] if torn_down else [])]
    assert done.stdout.splitlines() == said
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert "RuntimeError" in done.stderr


PEER_ERRORS = [
    RuntimeError(
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:39309: "
        "Connection reset by peer. This is typically caused by a remote worker hanging"
    ),
    RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:41234"),
    RuntimeError(
        "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    ),
    RuntimeError("[pair.cc:494] writev [10.0.0.1]:9: Broken pipe"),
    RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistStoreError("wait timeout after 300000ms, keys: /0//cpu//1/2"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp: remote process exited or network error"
    ),
    dist.DistBackendError(
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
    ),
    TransferError("block pp0.dp1.tp0 was lost on the way from node3"),
]
OWN_ERRORS = [
    ValueError("Connection reset by peer"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    # torch's words on AMD's devices (ROCm)
    RuntimeError("HIP error: an illegal memory access was encountered"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled hip error, socket closed"
    ),
    RuntimeError("shape mismatch"),
    ConnectionResetError(104, "Connection reset by peer"),  # the user's own download
    dist.DistBackendError(
        "NCCL error: ncclInvalidUsage, Duplicate GPU detected : rank 0 and rank 1"
    ),
    AuthenticationError("foreign secret"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*PEER_ERRORS, *OWN_ERRORS], ids=lambda e: repr(e)[:60])
def test_lost_communication_is_a_peers_fault_and_everything_else_its_own(
    error: BaseException,
) -> None:
    assert is_peer_failure(error) is (error in PEER_ERRORS)


def test_what_it_was_raised_from_counts() -> None:
    lost = dist.DistNetworkError("Connection was likely closed")
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = lost
    left = SystemExit(1)  # except Exception: traceback.print_exc(); sys.exit(1)
    left.__context__ = wrapped
    assert is_peer_failure(left)
    assert is_peer_failure(ExceptionGroup("several", [ValueError("a"), lost]))
    hidden = ValueError("raise ... from None")
    hidden.__context__, hidden.__suppress_context__ = lost, True
    assert not is_peer_failure(hidden)


def test_a_circular_chain_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not is_peer_failure(first)


def test_notes_survive_the_way_through_the_file(tmp_path: Path) -> None:
    note = ExitNote.from_error(dist.DistNetworkError("Connection reset\nC++ stack ..."))
    note.write(tmp_path, 3)
    assert ExitNote.read(tmp_path, 3) == note
    assert note == ExitNote(ExitCause.PEER, "DistNetworkError: Connection reset")
    assert ExitNote.read(tmp_path, 0) is None
    (tmp_path / "0.json").write_text('{"cause": "pe')
    assert ExitNote.read(tmp_path, 0) is None
    assert len(ExitNote.from_error(ValueError("x" * 10_000)).error) < 300
    assert (
        ExitNote.from_error(ValueError("these differ:\n  lr: 1, 2")).error
        == "ValueError: these differ"
    )


PEER = WorkerExit(75, ExitNote(ExitCause.PEER, "RuntimeError: Connection closed by peer"))


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (WorkerExit(1, ExitNote(ExitCause.OWN, "ValueError: x")), ExitCause.OWN),
        (WorkerExit(1, None), ExitCause.OWN),
        (WorkerExit(2, ExitNote.from_error(ConfigError("write this"))), ExitCause.REFUSED),
        (
            WorkerExit(2, ExitNote.from_error(UnrecoverableError("no version is left"))),
            ExitCause.REFUSED,
        ),
        (
            WorkerExit(1, ExitNote.from_error(ModuleNotFoundError("No module named 'x'"))),
            ExitCause.REFUSED,
        ),
        (WorkerExit(1, ExitNote.from_error(SyntaxError("invalid syntax"))), ExitCause.REFUSED),
        (WorkerExit(2, None), ExitCause.REFUSED),  # argparse; no such script
        (WorkerExit(2, ExitNote.from_error(SizeError("other numbers do"))), ExitCause.SIZE),
        (
            WorkerExit(
                1,
                ExitNote.from_error(
                    RuntimeError("num_stages (2) must divide distributed world size (3)")
                ),
            ),
            ExitCause.SIZE,
        ),
        (WorkerExit(1, ExitNote.from_error(JobInUseError("later"))), ExitCause.OWN),
        (WorkerExit(-signal.SIGKILL, None), ExitCause.OWN),  # out of memory
        (WorkerExit(-signal.SIGSEGV, None), ExitCause.OWN),
        (WorkerExit(-signal.SIGABRT, None), ExitCause.UNCLEAR),  # NCCL's watchdog, or its own bug
        (WorkerExit(143, None), ExitCause.STOPPED),
        (WorkerExit(75, None), ExitCause.PEER),
        (PEER, ExitCause.PEER),
        (WorkerExit(None, PEER.note), ExitCause.PEER),
    ],
)
def test_every_way_to_end_has_one_cause(end: WorkerExit, cause: ExitCause) -> None:
    assert end.cause is cause


def test_one_own_failure_makes_the_nodes_failure_its_own() -> None:
    killed = WorkerExit(-signal.SIGKILL, None)
    own = TrainerFailure(ExitCause.OWN, 1, 137, "local rank 1: killed by SIGKILL")
    assert judge({0: PEER, 1: killed, 2: PEER}) == own
    refused = WorkerExit(2, ExitNote.from_error(ConfigError("write this")))
    said = TrainerFailure(ExitCause.REFUSED, 1, 2, "local rank 1: ConfigError: write this")
    assert judge({0: killed, 1: refused}) == said
    assert judge({0: PEER, 1: PEER}).cause is ExitCause.PEER
    assert judge({1: PEER, 0: WorkerExit(143, None)}).cause is ExitCause.PEER


@pytest.mark.parametrize(
    ("failed", "cause", "reason"),
    [
        (
            PEER,
            ExitCause.UNCLEAR,
            "rank 8 ended with exit code 0 at step 7 while other ranks trained on",
        ),
        (
            WorkerExit(-signal.SIGABRT, None),
            ExitCause.UNCLEAR,
            "rank 8 ended with exit code 0 at step 7",
        ),
        (WorkerExit(-signal.SIGKILL, None), ExitCause.OWN, "local rank 1: killed by SIGKILL"),
    ],
)
def test_a_rank_that_ended_well_is_named_where_another_lost_it(
    failed: WorkerExit, cause: ExitCause, reason: str
) -> None:
    """Uneven data: it has one batch fewer than the others."""
    found = name_ended_early(judge({1: failed}), {8: "exit code 0 at step 7"})
    assert found.cause is cause
    assert found.reason.startswith(reason)
    assert found.ended_early is (cause is ExitCause.UNCLEAR)
    assert name_ended_early(judge({1: failed}), {}) == judge({1: failed})


def test_exit_codes_are_the_shells() -> None:
    assert [shell_code(WorkerExit(c, None)) for c in (3, -11, None)] == [3, 139, 1]
    # That a launcher was told to stop, or cut off, is said of it alone.
    assert [shell_code(WorkerExit(c, None)) for c in (143, -15, 130, -2, 129, 131, 76)] == [1] * 7
    assert shell_code(WorkerExit(None, PEER.note)) == 75
    assert shell_code(WorkerExit(None, ExitNote(ExitCause.REFUSED, "ConfigError: x"))) == 2
