"""Build every distribution into dist/, and check the wheels in clean environments: `make release`.

    python scripts/release.py [--torch "torch==2.13.*"] [--jobs 2] [--without-kit] [NAME ...]

1. An sdist of each distribution, and a wheel from that sdist, which must have every file of the sources.
2. `stratagem` from wheels: its commands, and a fit in two processes. Then `stratagem[all]` and contrib/.
3. Each distribution (or NAME alone) in an environment of its own, with what it declares and nothing else: every module
   is imported, every entry point loaded. Then the kit is installed, and checks the first plugin of each kind in
   each Python package; a distribution of contrib/ runs its own tests instead.

uv makes an environment in a second: its files, torch's included, are hard links to uv's cache. uv also looks for wheels
where PIP_FIND_LINKS points to, at a torch without CUDA, for instance.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from environment import DIST, ROOT, Environment, Project, projects, uv

#: Programs that run in the environments.
CHECK, FIT = (Path(__file__).with_name(name) for name in ("check_installed.py", "two_processes.py"))
#: Below the repository, where uv's cache is more often on the same disk than /tmp is.
SCRATCH = ROOT / "build"
#: Extras that plugins need for the checks of the kit.
EXTRAS = {"stratagem-callbacks": "tensorboard"}


def build() -> None:
    """Fill dist/ with an sdist of each project, and a wheel from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    for project in projects():
        with _with_license(project.folder):
            uv("build", "--quiet", "--out-dir", DIST, project.folder)
        expected = {*project.source_files(), project.license}
        if missing := expected - set(zipfile.ZipFile(project.wheel).namelist()):
            raise SystemExit(f"{project.wheel.name} lacks {len(missing)} files of the sources: {sorted(missing)[:5]}")


@contextlib.contextmanager
def _with_license(folder: Path) -> Iterator[None]:
    """Put the repository's license into `folder` while its distribution is built: each one has to contain it."""
    copy = folder / "LICENSE"
    if copy.exists():
        yield
        return
    shutil.copy(ROOT / "LICENSE", copy)
    try:
        yield
    finally:
        copy.unlink()


def check_together(folder: Path, torch: str) -> str:
    """Check `stratagem`, then its extra all beside the packages of contrib/."""
    environment = Environment.make(folder, torch)
    environment.install("stratagem")
    environment.stratagem("--version")
    environment.run(FIT)
    listed = environment.stratagem("plugins", "list")
    if "deepspeed" in listed:
        raise SystemExit("stratagem installs DeepSpeed; expected no heavy engine")
    environment.install("setuptools", "wheel", "psutil", "packaging", "py-cpuinfo")  # DeepSpeed's build imports torch
    environment.install(
        "--no-build-isolation-package", "deepspeed", "stratagem[all]",
        *(each.name for each in projects() if each.is_third_party),
    )  # fmt: skip
    for command in (["--help"], ["plugins", "list"], ["plugins", "check"], ["doctor"]):
        environment.stratagem(*command)
    environment.run(CHECK, *(each.name for each in projects() if each.source_files()))
    environment.run(FIT)
    return f"{len(projects())} distributions: commands, imports, a fit in two processes"


def check_alone(project: Project, folder: Path, core: Environment, with_kit: bool) -> str:
    """Check `project` beside the core, then with the kit."""
    environment = core.copy(folder)
    engine = ("--no-build-isolation-package", "deepspeed")
    if project.name == "stratagem-deepspeed":
        environment.install("setuptools", "wheel", "psutil", "packaging", "py-cpuinfo")
    environment.install(*engine, project.name)
    alone = environment.run(CHECK, project.name).strip().rpartition(",")[0]
    if not with_kit:
        return alone
    extra = "test" if project.is_third_party else EXTRAS.get(project.name, "")
    environment.install(*engine, f"{project.name}[{extra}]", "stratagem-testing")
    if not project.is_third_party:
        return environment.run(CHECK, project.name, "--kit").strip()
    for path in (*project.folder.glob("test_*.py"), *project.folder.glob("conftest.py")):
        shutil.copy(path, folder)
    return (
        f"{alone}; {environment.run('-m', 'pytest', '-q', '-p', 'no:cacheprovider', folder).strip().splitlines()[-1]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="check only these alone; nothing together")
    parser.add_argument("--torch", default="torch", help="the requirement of torch, such as torch==2.13.*")
    parser.add_argument("--without-kit", action="store_true", help="only import what is installed: a minute or two")
    parser.add_argument("--jobs", type=int, default=2, help="how many distributions are checked at once")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {each.name for each in projects()}:
        parser.error(f"no distribution is called {', '.join(sorted(unknown))}")
    os.environ.setdefault("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))

    build()
    print(f"{DIST}: {len(list(DIST.iterdir()))} files", flush=True)
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-", dir=SCRATCH) as scratch:
        core = Environment.make(Path(scratch) / "core", arguments.torch)
        core.install("--compile-bytecode", "stratagem-core")  # torch is compiled once, not in each environment
        checks: dict[str, Callable[[Path], str]] = {}
        if not arguments.names:
            checks["together"] = lambda folder: check_together(folder, arguments.torch)
        for project in projects():
            if project.source_files() and project.name in (arguments.names or [project.name]):
                checks[project.name] = partial(check_alone, project, core=core, with_kit=not arguments.without_kit)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            failed = sum(pool.map(lambda name: report(name, checks[name], Path(scratch) / name), checks))
    print(f"{failed} of {len(checks)} failed" if failed else f"all {len(checks)} passed")
    return int(failed > 0)


def report(name: str, check: Callable[[Path], str], folder: Path) -> bool:
    """Run `check` in `folder`, remove that, print the result; return whether it failed."""
    began = time.monotonic()
    try:
        outcome, failed = check(folder), False
    except SystemExit as error:
        outcome, failed = f"FAILED: {error}", True
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name} ({time.monotonic() - began:.0f} s): {outcome}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
