"""One run on a GPU: whether the Triton kernels and the engine on top of them are right, and how fast they are.

    python benchmarks/gpu_check.py [--json FILE] [--only SECTION ...] [--limit 300] [--interpret] [--wheels DIR]

    kernels   every Triton kernel against float64, replays of a captured launch against eager ones
    backend   the step's inputs, argmax, largest, copies and moves of blocks, against plain ones
    engine    a tiny random Llama: kernel triton against torch, graphs against none, two plans in flight against one
    decode    bandwidth of attention of decodes, as a share of that of a copy
    llama     the shape of Llama-3.1-8B with random weights: steps beside the bytes they read, where their time goes
    memory    what the start measured of steps and graphs, beside what they take
    prefill   rate of attention of prompts, as a share of that of a product, and beside torch's and others
    tiles     attention's tiles, and the entries of the table among them
    swap      blocks moved to the host and back, as a share of a plain copy of page-locked memory

It takes five minutes at most (--limit, in seconds): each section has a part of them, and leaves out what it has no time
for. What a section raises is shown and written to the file, and the others go on. The exit code is 1 after an exception
or a wrong result, not for a goal that is missed.

It runs from a checkout in which nothing is installed. `kernels`, `decode`, `prefill` and `tiles` need numpy, torch and
triton; the others need the packages of the engine, too, and are skipped where one is missing. For a machine without a
network, fetch them beforehand and name the folder with --wheels: they are installed for this run only, ahead of what is
there. For Python 3.12 they are fetched by

    python -m pip download --only-binary :all: --no-deps --python-version 3.12 --platform manylinux2014_x86_64 -d DIR
        msgspec pluggy pydantic pydantic-core annotated-types typing-inspection typing-extensions pydantic-settings
        python-dotenv structlog psutil jinja2 markupsafe pyyaml tokenizers prometheus-client

--interpret runs the same code on the CPU, in Triton's interpreter, on tiny shapes; its timings mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_package import ROOT, package

SECTIONS = {
    "kernels": 45, "backend": 15, "engine": 40, "decode": 25, "llama": 90, "memory": 10, "prefill": 20, "tiles": 40,
    "swap": 10,
}  # fmt: skip
"""Seconds that each may take, at most."""
ENGINE = ("backend", "engine", "llama", "memory", "swap")
"""Those that need the engine's packages."""
TIMED = ("decode", "llama", "memory", "prefill", "tiles", "swap")
"""Those beside which nothing is to be compiled."""
COMPILING = 60


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything here, after each section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all sections")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, in Triton's interpreter")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this run needs")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    begin = time.monotonic()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # it counts when triton is first imported
    faulthandler.dump_traceback_later(options.limit + 60, exit=True)  # a kernel that never ends
    try:
        with package(options.wheels) as missing:  # before torch, which imports some of them
            return _run(options, missing, begin)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(options: argparse.Namespace, missing: list[str], begin: float) -> int:
    import torch
    from common import header
    from gpu_common import Report, Run, about

    if options.interpret:
        _interpreter()
    elif not torch.cuda.is_available():
        sys.exit("no CUDA device is usable here; --interpret runs the same code on the CPU")
    device = torch.device("cpu") if options.interpret else torch.device("cuda", torch.cuda.current_device())
    report = Report(options.json)
    run = Run(device, options.interpret, report, options.limit)
    run.missing = missing
    report.about |= about(run)
    if "psutil" not in missing:
        header()
    for name, value in report.about.items():
        print(f"{name:12} {value}")
    with torch.inference_mode():
        _sections(run, [name for name in SECTIONS if name in options.only])
    return _summary(report, time.monotonic() - begin)


def _interpreter() -> None:
    """bfloat16 and 8-bit floats in Triton's interpreter as hardware computes them: what the tests use."""
    sys.path.append(str(ROOT / "tests"))
    import interpreter

    interpreter.install()


def functions() -> dict[str, Callable[[Any], None]]:
    """Imported when they run, as a package that is missing is a section's affair."""

    def of(module: str, name: str) -> Callable[[Any], None]:
        def run_it(run: Any) -> None:
            import importlib

            getattr(importlib.import_module(module), f"check_{name}")(run)

        return run_it

    homes = {"kernels": "gpu_kernels", **dict.fromkeys(("decode", "prefill", "tiles"), "gpu_speed")}
    homes |= dict.fromkeys(("llama", "memory"), "gpu_llama")
    return {name: of(homes.get(name, "gpu_engine"), name) for name in SECTIONS}


def _sections(run: Any, names: list[str]) -> None:
    from gpu_common import Skip, Wrong

    compiler, report, timed = _compiler(run, names), run.report, False
    some = functions()
    gc.freeze()  # torch collects garbage before each capture
    try:
        for name in names:
            if compiler is not None and name in TIMED and not timed:
                timed = True
                print(f"\n{compiler.wait(min(COMPILING, run.end - time.monotonic()))}", flush=True)
                compiler.close()
            if run.big is not None and name not in ("llama", "memory"):
                run.big.close()
                run.big = None
            report.begin(name)
            began = time.monotonic()
            run.deadline = min(run.end, began + SECTIONS[name])
            status, error = "right", ""
            try:
                if name in ENGINE and run.missing:
                    hint = f"pip install {' '.join(run.missing)}, or --wheels DIR"
                    raise Skip(f"skipped: packages are missing ({hint})")
                if run.left() < 2:
                    raise Skip("skipped: no time is left; --limit gives more")
                some[name](run)
            except Skip as reason:
                status, error = "skipped", str(reason)
                print(f"  {reason}")
            except Wrong as wrong:
                status = "FAILED" if report.sections[name]["raised"] else "WRONG"
                error = str(wrong)
            except Exception as exception:  # noqa: BLE001 - whatever it is: shown, written, and the others go on
                status, error = "FAILED", "".join(traceback.format_exception(exception))
                print(error, flush=True)
            report.end(status, time.monotonic() - began, error)
    finally:
        if compiler is not None:
            compiler.close()
        if run.big is not None:
            run.big.close()
            run.big = None


def _compiler(run: Any, names: list[str]) -> Any:
    """Processes at work on what the sections launch; those of `kernels` are done when this returns, if time allows."""
    if run.interpret:
        return None
    from gpu_kernels import Compiler, kernels, scenes, variants
    from gpu_speed import speed_variants

    device = kernels().launch.device_of(run.device)
    first, more = [], []
    if "kernels" in names:
        first = [one for scene in scenes(run, device.capability) for one in variants(scene, device)]
    if {"decode", "prefill", "tiles"} & set(names):
        more = list(speed_variants(run, device))
    if not first and not more:
        return None
    found = Compiler([*first, *more], device.capability)
    print(f"\n{found.wait(COMPILING, len(set(first)))}", flush=True)
    return found


def _summary(report: Any, seconds: float) -> int:
    """The table's end, and the exit code."""
    from common import finish

    print("\nsection      status    seconds")
    for name, one in report.sections.items():
        *_, why = ["", *one["error"].strip().splitlines()]
        print(f"{name:12} {one['status']:8} {one['seconds']:8.1f}  {why[:200]}".rstrip())
    finish(False, report.goals)
    print(f"{seconds:.0f} seconds in all")
    bad = [name for name, one in report.sections.items() if one["status"] in ("WRONG", "FAILED")]
    if bad:
        for name in bad:
            for line in report.sections[name]["error"].strip().splitlines()[-20:]:
                print(f"  {name}: {line[:200]}")
        print(f"not right: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
