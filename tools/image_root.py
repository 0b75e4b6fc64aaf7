"""Carries out the steps of ``deploy/docker/Dockerfile`` in a fresh root, where no container engine runs.

    sudo python -m tools.image_root FOLDER [--mirror URL] [--bind PATH ...] [--arg NAME=VALUE ...]

debootstrap makes the Debian of the base image, whose Python is Debian's own; everything after ``FROM`` is what the
file says, in its order. ``Image.started`` runs the result as a container: with process ids, mounts and a network of its
own, as the file's user, without capabilities, and, where asked, with a root that cannot be written to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = REPOSITORY / "deploy" / "docker" / "Dockerfile"
BASE = "python:3.11-slim-bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
PASSED = re.compile(r"PIP_|UV_|SSL_|REQUESTS_|.*_proxy$|.*_PROXY$")
"""Variables of the machine that say where packages come from; a build on another machine has others."""

NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
START_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MOUNTED = (
    "mount --bind $ROOT $ROOT",
    "mount -t proc proc $ROOT/proc",
    "mount --rbind /dev $ROOT/dev",
    "mount -t tmpfs -o mode=1777,size=2g shm $ROOT/dev/shm",
)
"""What every container has: lines of a shell."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile: each a word and what follows it, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines()) if word
    ]


@dataclass
class Image:
    """What the steps have made.

    Attributes:
        root: The folder that becomes ``/``.
        environment: What ``ENV`` has set.
        user: Number of the user that runs it.
        entrypoint, command: Words of the process.
        health: Words of the health check.
        port: What ``EXPOSE`` says.
        volumes: Folders that outlive a container.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": START_PATH})
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    port: int = 0
    volumes: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"

    @contextlib.contextmanager
    def started(
        self,
        log: Path,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] | None = None,
        read_only: bool = False,
        mounts: Sequence[str] = (),
    ) -> Iterator[Container]:
        """Runs the image until the context ends.

        Args:
            log: Takes what it prints.
            command: In the place of ``CMD``.
            read_only: Whether nothing but the mounts can be written to.
            mounts: Lines of a shell that mount something below ``$ROOT``.
        """
        words = [*self.entrypoint, *(self.command if command is None else command)]
        variables = [f"{name}={value}" for name, value in {**self.environment, **environment}.items()]
        inner = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", "--no-new-privs"]
        inner += ["--bounding-set=-all", "--inh-caps=-all", "env", "-i", *variables, *words]
        script = [*_MOUNTED, "ip link set lo up", *mounts]
        script += ["mount -o remount,bind,ro $ROOT"] if read_only else []
        outer = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*outer, "sh", "-ec", "\n".join([*script, f"exec chroot $ROOT {shlex.join(inner)}"])],
                env={"PATH": os.environ["PATH"], "ROOT": str(self.root)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        container = Container(self, process)
        try:
            yield container
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Container:
    """A running image; its first process is the entry point."""

    image: Image
    process: subprocess.Popen[bytes]

    def run(self, words: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command beside the entry point, as its user, and returns its end."""
        variables = [f"{name}={value}" for name, value in self.image.environment.items()]
        (first,) = psutil.Process(self.process.pid).children()
        enter = ["nsenter", f"--target={first.pid}", "--mount", "--pid", "--net", "--ipc", "--root", "--wd=/"]
        enter += [f"--setuid={self.image.user}", f"--setgid={self.image.user}", "env", "-i", *variables, *words]
        return subprocess.run(enter, capture_output=True, text=True, timeout=timeout_s, check=False)

    def stop(self, timeout_s: float) -> int:
        """Sends the stop signal; returns the exit status. The kernel ends what is left of its processes."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(signal.Signals[self.image.stop_signal])
        return self.process.wait(timeout_s)


def build(folder: Path, mirror: str, binds: Sequence[Path] = (), arguments: Mapping[str, str] | None = None) -> Image:
    """Carries the steps out; what an earlier call has left in the folder is made again.

    Args:
        folder: Takes a root for each stage.
        mirror: Address of a mirror of Debian.
        binds: Files and folders of this machine that steps may read, such as a folder of wheels.
        arguments: Values of ``ARG``.

    Raises:
        subprocess.CalledProcessError: A step fails; its output has been printed.
    """
    base = folder / "base"
    if not base.exists():
        suite = BASE.rpartition("-")[2]
        _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(base), mirror])
        (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    stages: dict[str, Image] = {}
    image, values, directory = Image(base), dict(arguments or {}), "/"
    for word, rest in instructions(DOCKERFILE.read_text("utf-8")):
        match word:
            case "FROM":
                name, _, stage = rest.partition(" AS ")
                if name != BASE:
                    raise ValueError(f"FROM: got {name!r}, expected {BASE!r}, which is what debootstrap makes here")
                image, directory = Image(folder / (stage or "image")), "/"
                stages[stage] = image
                shutil.rmtree(image.root, ignore_errors=True)
                _run(["cp", "-a", str(base), str(image.root)])
            case "ARG":
                name, _, default = rest.partition("=")
                values.setdefault(name, default.strip('"'))
            case "WORKDIR":
                directory = rest
                (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(rest, image, stages, directory)
            case "RUN":
                _step(image, rest, directory, binds, values)
            case "ENV":
                for each in shlex.split(rest):
                    name, _, value = each.partition("=")
                    image.environment[name] = value.replace("$PATH", image.environment["PATH"])
            case "USER":
                image.user = rest
            case "VOLUME":
                image.volumes.append(rest)
            case "EXPOSE":
                image.port = int(rest)
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case "CMD":
                image.command = json.loads(rest)
            case "HEALTHCHECK":
                image.health = json.loads(rest.partition("CMD ")[2])
            case "STOPSIGNAL":
                image.stop_signal = rest
            case _:
                raise ValueError(f"{DOCKERFILE.name}: {word} is not carried out here")
    return image


def _copy(rest: str, image: Image, stages: Mapping[str, Image], directory: str) -> None:
    *options, source, target = rest.split()
    place = image.root / os.path.join(directory, target).lstrip("/")
    if options:
        stage = stages[options[0].removeprefix("--from=")]
        _run(["cp", "-a", str(stage.root / source.lstrip("/")), str(place)])
        return
    listed = subprocess.run(["git", "ls-files", "-z", source], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (REPOSITORY / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, place / name, follow_symlinks=False)


def _step(image: Image, command: str, directory: str, binds: Sequence[Path], values: Mapping[str, str]) -> None:
    passed = {name: value for name, value in os.environ.items() if PASSED.match(name)}
    variables = [f"{name}={value}" for name, value in {**passed, **image.environment, **values}.items()]
    script = [*_MOUNTED]
    for path in (*map(Path, NETWORK_FILES), *binds):
        if path.exists():
            target = f"$ROOT{path}"
            made = f"mkdir -p {target}" if path.is_dir() else f"mkdir -p $(dirname {target}); touch {target}"
            script += [f"{made}; mount --bind {path} {target}"]
    inner = shlex.join(["env", "-i", *variables, "sh", "-ec", f"cd {directory}\n{command}"])
    _run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join([*script, f"exec chroot $ROOT {inner}"])],
        {"ROOT": str(image.root)},
    )


def _run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    print("+", shlex.join(words)[:400], flush=True)
    subprocess.run(words, env={**os.environ, **(environment or {})}, check=True, stdin=subprocess.DEVNULL)


def main() -> None:
    """Builds the root; prints what would run in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--bind", type=Path, action="append", default=[])
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE of an ARG, as TORCH_INDEX_URL=...")
    given = parser.parse_args()
    made = build(given.folder, given.mirror, given.bind, dict(each.split("=", 1) for each in given.arg))
    print(f"{made.root}: user {made.user}, port {made.port}, {shlex.join([*made.entrypoint, *made.command])}")


if __name__ == "__main__":
    main()
