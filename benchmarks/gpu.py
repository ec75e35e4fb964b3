"""The first minutes on a GPU: what tells most comes first, under one budget (``make gpu
MINUTES=8``).

Parts in this order, each with a limit in proportion to the minutes; what fails is written down with
its error, and the rest goes on:

- facts: 19 facts of driver, link, kernels and allocator (``gpu_facts.py``);
- job: two jobs over NCCL, one of which is killed: losses equal to the bit (``gpu_job.py``);
- baseline: a version at every step of a 1.7B model on one device, beside what others published;
- fast, ranks, parities: the tests of every path in :data:`PATHS`, these three at the same time;
- replay: bubbles of a stage of a Llama-2 pipeline, HAS against everything queued at once;
- restore and memory_copy: two ranks, which share the device.

Every row is shown and written to the ``.log`` file when it is measured, the JSON and the Markdown
file after every part; they are named by date and device. Exits with 1 if a part failed, with 2 if
there is no device. ``--device sim --quick`` tries the program on the simulated device of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

import has_gpu
import memory_copy
import restore
import torch
from common import progress
from replay_stage import GpuDevice, SimulatedDevice
from results import machine

ROOT = Path(__file__).resolve().parents[1]
PATHS = {
    "streams, events and pinned memory of the driver": "tests/device/test_vendors.py",
    "copies on a side stream into pinned arenas": "tests/snapshot/test_copy_engines.py",
    "staging in device memory": "tests/snapshot/test_staging.py",
    "the snapshot worker and its pacer": "tests/device/test_worker.py",
    "parities by torch and by CuPy": "tests/protect/test_backends.py",
    "parities by either within the engine": "tests/snapshot/test_copier.py",
    "capture of gradients": "tests/engine/test_aor.py",
    "ExactAdam": "tests/test_optim.py",
    "what every start tries": "tests/device/test_check.py",
    "the checksums that peers compare": "tests/device/test_peers.py",
    "buffers that are late": "tests/state/test_rng.py",
    "random states of a device": "tests/state/test_rng.py",
    "restoring to a device": "tests/engine/test_engine.py",
    "watching the memory of a device": "tests/node/test_device_memory.py",
}
"""What only a device can prove, and the file whose tests marked ``gpu`` prove it."""

PUBLISHED = {
    "what": "a 1.7B model on one GPU, a checkpoint at every step; a stress test on a machine "
    "unnamed",
    "source": "https://github.com/NVIDIA-NeMo/Automodel/pull/3131",
    "step_secs": {"asynchronous staging": [4.35, 5.66], "the loop waits for staging": [0.43, 0.54]},
}
GROUPS = (
    ("facts",),
    ("job",),
    ("baseline",),
    ("fast", "ranks", "parities"),
    ("replay",),
    ("restore",),
    ("memory_copy",),
)
"""Parts of a group run at the same time: only tests, which measure nothing."""
LIMITS_SECS = {
    **{
        "facts": 85,
        "job": 75,
        "baseline": 175,
        "fast": 90,
        "ranks": 110,
        "parities": 110,
        "replay": 90,
    },
    **{"restore": 120, "memory_copy": 120},
}
"""Of eight minutes; more of more."""
LEAST_SECS = 20  # no part begins later than this before the end
RANKS = ("tests/engine/test_engine.py", "tests/engine/test_aor.py")
PARITIES = ("tests/protect/test_backends.py",)
TESTS = ("fast", "ranks", "parities")
TAIL_LINES = 30
END_SECS = 20  # for a program that was told to end


def test_files(part: str, paths: Sequence[str]) -> list[str]:
    """Files of a part of the tests."""
    of_part = {"ranks": RANKS, "parities": PARITIES}
    files = dict.fromkeys(PATHS[name] for name in paths)
    if part in of_part:
        return [file for file in files if file in of_part[part]]
    return [file for file in files if file not in (*RANKS, *PARITIES)]


def commands(options: argparse.Namespace, reports: Path) -> dict[str, list[str]]:
    """Of each part. Parts without a test to run are left out."""
    places = [f"--{name}={getattr(options, name)}" for name in ("shm", "disk")]
    device = ["--device", options.device, "--json", *places]
    replay, ranks, small = (
        (["--self-test"], ["--quick"], ["--small"]) if options.quick else ([], [], [])
    )
    model = "tiny" if options.quick else str(Path(__file__).with_name("qwen3-1.7b.json"))
    alone = ["--pp", "1", "--stage", "0", "--dp", "1", "--copies", "0"]
    rows = ["--rounds", "4", "--trials", "3", "--samples", "64"]
    found = {
        "facts": ["benchmarks/gpu_facts.py", "--device", options.device, *places, *small],
        "job": ["benchmarks/gpu_job.py", f"--shm={options.shm}", *small],
        "baseline": [
            *("benchmarks/has_gpu.py", "--models", model, *alone, *rows),
            *("--variants", "blocking", "has", *device, *replay),
        ],
    }
    for part in TESTS:
        if files := test_files(part, options.paths):
            report = f"--junitxml={reports / part}.xml"
            found[part] = [
                "-m",
                "pytest",
                "-m",
                "gpu",
                "-rs",
                "-n0",
                "--timeout",
                "60",
                report,
                *files,
            ]
    return {
        **found,
        "replay": [
            *(
                "benchmarks/has_gpu.py",
                "--models",
                "1.3b",
                "--rounds",
                "8",
                "--trials",
                "4",
                "--samples",
                "64",
            ),
            *("--variants", "blocking", "host_device", "has", *device, *replay),
        ],
        "restore": ["benchmarks/restore.py", "--trials", "3", *device, *ranks],
        "memory_copy": ["benchmarks/memory_copy.py", "--rounds", "6", *device, *ranks],
    }


# --- running --------------------------------------------------------------------------------------


def run(name: str, arguments: Sequence[str], limit_secs: float, log: TextIO) -> dict[str, Any]:
    """Run a part. What it says is shown and logged at once; what it prints as JSON is its
    result."""
    progress(f"--- {name}, at most {limit_secs:.0f} s")
    begin, tail, facts = time.monotonic(), deque[str](maxlen=TAIL_LINES), list[dict[str, Any]]()
    has_json = name not in (*TESTS, "facts")
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=out if has_json else subprocess.PIPE,
            stderr=subprocess.PIPE if has_json else subprocess.STDOUT,
            text=True,
            errors="replace",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
                ),
            },
            start_new_session=True,
        )

        def show() -> None:
            for line in process.stdout or process.stderr or ():
                tail.append(line.rstrip())
                log.write(f"{name}: {tail[-1]}\n")
                log.flush()
                progress(tail[-1])
                if line.startswith('{"fact"'):
                    facts.append(json.loads(line))

        shown = threading.Thread(target=show, daemon=True)
        shown.start()
        try:
            process.wait(limit_secs)
            failed = f"it ended with status {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            failed = f"it took longer than {limit_secs:.0f} s"
            if name in TESTS:  # pytest writes down what has passed by then
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECS)
        finally:
            end(process)
        shown.join(END_SECS)
        out.seek(0)
        text = out.read()
    found: dict[str, Any] = {
        "secs": round(time.monotonic() - begin, 1),
        "limit_secs": round(limit_secs),
    }
    if name == "facts":
        found["facts"] = facts
    elif has_json and "{" in text:
        try:
            found["result"] = json.loads(text[text.index("{") :])
        except ValueError:
            failed = failed or f"it printed no JSON: {text[-1000:]}"
    elif has_json:
        failed = failed or "it printed no JSON"
    return found if failed is None else {**found, "error": "\n".join([failed, *tail])}


def end(process: subprocess.Popen[str]) -> None:
    """End a program and what it started, politely at first: it removes its scratch."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_SECS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def paths_of(reports: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each path how many of its tests passed, which failed, and why some were skipped."""
    cases = [
        c for report in reports.glob("*.xml") for c in ElementTree.parse(report).iter("testcase")
    ]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        module = PATHS[name].removesuffix(".py").replace("/", ".")
        mine = [c for c in cases if f"{c.get('classname')}.".startswith(f"{module}.")]
        wrong = [c for c in mine if c.find("failure") is not None or c.find("error") is not None]
        reasons = [
            skipped.get("message") or "" for c in mine if (skipped := c.find("skipped")) is not None
        ]
        found[name] = {
            "file": PATHS[name],
            "passed": len(mine) - len(wrong) - len(reasons),
            "failed": sorted({str(c.get("name")) for c in wrong}),
            "skipped": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        }
    return found


def driver() -> str | None:
    """Of the device, where the kernel tells."""
    files = (Path("/sys/module", name, "version") for name in ("nvidia", "amdgpu"))
    return next((file.read_text().strip() for file in files if file.exists()), None)


def software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "deepspeed",
        "reft-ckpt",
        "numpy",
        "cupy-cuda12x",
        "cupy-cuda13x",
        "cupy-rocm-7-0",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# --- result ---------------------------------------------------------------------------------------


def baseline_lines(part: Mapping[str, Any]) -> list[str]:
    """Ours beside theirs."""
    lines = ["| a version at every step | seconds a step | more than without |", "|---|---|---|"]
    for way, (low, high) in PUBLISHED["step_secs"].items():
        lines.append(f"| published: {way} | {low} to {high} | |")
    for model in part.get("result", {}).get("models", ()):
        if free := model.get("free"):
            over, (low, high) = free["overhead"]["median"], free["overhead"]["ci95"]
            secs, count = (
                free["step_secs"]["median"],
                f"{free['committed']} of {free['versions']} versions",
            )
            lines.append(
                f"| here, running freely: has, {count} | {secs:.3f} | {over:.2%} [{low:.2%}, "
                f"{high:.2%}] |"
            )
        for name, way in model["variants"].items():
            secs, over, (low, high) = (
                way["step_secs"]["median"],
                way["overhead"]["median"],
                way["overhead"]["ci95"],
            )
            taken = (
                ""
                if name == "none"
                else f", {way['versions']} of {way['step_secs']['samples']} steps"
            )
            shown = "" if name == "none" else f"{over:.2%} [{low:.2%}, {high:.2%}]"
            lines.append(f"| here: {name}{taken} | {secs:.3f} | {shown} |")
        scaled = (
            ""
            if model["layers"] == model["layers_wanted"]
            else f" of {model['layers_wanted']} (SCALED DOWN)"
        )
        lines += [
            "",
            f"Here: {model['model']}, {model['layers']} layers{scaled}, "
            f"{model['parameters'] / 1e9:.2f}B parameters, {model['snapshot_bytes'] / 1e9:.1f} GB "
            f"a version, link {model['link_bytes_per_sec'] / 1e9:.1f} GB/s. `has` is reft's "
            "default; the goal is 1 %.",
        ]
    return [*lines, "", f"Published: {PUBLISHED['what']}: {PUBLISHED['source']}."]


def markdown(result: Mapping[str, Any]) -> str:
    """The result for people."""
    host, device, parts = result["machine"], result["device"], result["parts"]
    memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
    lines = [
        f"# {device['name']}, {result['date']}",
        "",
        *(["**A trial of the program: the times mean nothing.**", ""] if result["trial"] else []),
        f"`{result['command']}`; {device['name']}{memory}, {device.get('runtime', 'no runtime')}, "
        f"driver {result['driver']}; {host['cores']} cores of {host['cpu']}, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB"
        + "; "
        + ", ".join(f"{name} {number}" for name, number in result["software"].items()),
        "",
        "| part | outcome | seconds |",
        "|---|---|---|",
        *(
            f"| {name} | {part['error'].splitlines()[0] if 'error' in part else 'passed'} | "
            f"{part['secs']} |"
            for name, part in parts.items()
        ),
    ]
    if "paths" in result:
        lines += ["", "## What only a device can prove", ""]
        lines += ["| path | tests | passed | failed | skipped |", "|---|---|---|---|---|"]
        for name, path in result["paths"].items():
            failed = ", ".join(path["failed"]) or "0"
            skipped = "; ".join(f"{count}: {why}" for why, count in path["skipped"].items()) or "0"
            cells = (name, f"`{path['file']}`", path["passed"], failed, skipped)
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    if "baseline" in parts:
        lines += [
            "",
            "## A version at every step of a 1.7B model",
            "",
            *baseline_lines(parts["baseline"]),
        ]
    if "facts" in parts:
        lines += [
            "",
            "## Facts",
            "",
            "```",
            *(json.dumps(fact) for fact in parts["facts"]["facts"]),
            "```",
        ]
    if found := parts.get("job", {}).get("result"):
        shown = {key: value for key, value in found.items() if not key.endswith("_log")}
        lines += ["", "## A job that is killed", "", "```", json.dumps(shown, indent=1), "```"]
    for name, module in (
        ("baseline", has_gpu),
        ("replay", has_gpu),
        ("restore", restore),
        ("memory_copy", memory_copy),
    ):
        if found := parts.get(name, {}).get("result"):
            lines += ["", f"## {name}", "", "```", module.table(found), "```"]
    for name, part in parts.items():
        if "error" in part:
            lines += ["", f"## What {name} said", "", "```", part["error"], "```"]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--minutes", type=float, default=8, help="for all parts (default 8)")
    made.add_argument(
        "--device", choices=("cuda", "sim"), default="cuda", help="(default cuda, ROCm's too)"
    )
    made.add_argument(
        "--parts", nargs="+", choices=LIMITS_SECS, default=list(LIMITS_SECS), help="(default all)"
    )
    made.add_argument(
        "--paths", nargs="+", choices=PATHS, default=list(PATHS), help="to test (default all)"
    )
    made.add_argument("--quick", action="store_true", help="tiny shapes: does the program work?")
    made.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "measurements", help="folder of both files"
    )
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for snapshots")
    made.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="for files")
    options = made.parse_args()
    for name in ("out", "shm", "disk"):
        setattr(options, name, getattr(options, name).resolve())
    return options


def main() -> int:
    options, begin = parse(), time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu: torch finds no CUDA or ROCm device; run it where there is one, with a torch "
            "built for it "
            "(make gpu GPU_PYTHON=python3), or try the program with --device sim --quick",
            file=sys.stderr,
        )
        return 2
    device = {"cuda": GpuDevice, "sim": SimulatedDevice}[options.device].facts()
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "trial": options.quick or options.device != "cuda",
        "machine": machine(),
        "device": device,
        "driver": driver(),
        "software": software(),
        "published": PUBLISHED,
        "parts": {},
    }
    slug = re.sub("[^a-z0-9]+", "-", device["name"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{result['date']}-gpu-{slug}"

    def write() -> None:
        result["secs"] = round(time.monotonic() - begin, 1)
        path.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        path.with_suffix(".md").write_text(markdown(result))

    total_secs = 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, path.with_suffix(".log").open("w") as log:
        made = commands(options, Path(folder))

        def run_part(name: str) -> None:
            left = total_secs - END_SECS - (time.monotonic() - begin)
            if left < LEAST_SECS:
                result["parts"][name] = {
                    "secs": 0.0,
                    "error": f"not run: {total_secs:.0f} s are over",
                }
                return
            limit_secs = min(LIMITS_SECS[name] * options.minutes / 8, left)
            result["parts"][name] = run(name, made[name], limit_secs, log)

        for group in GROUPS:
            names = [name for name in group if name in options.parts and name in made]
            with ThreadPoolExecutor(len(GROUPS)) as together:
                list(together.map(run_part, names))
            if set(names) & {*TESTS}:
                result["paths"] = paths_of(Path(folder), options.paths)
            write()
    print(*(path.with_suffix(suffix) for suffix in (".json", ".md", ".log")), sep="\n")
    return int(any("error" in part for part in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
