"""Keys, the file that keeps them, the command that writes it, and what a role opens."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest

from farsight.core.errors import FarsightError
from farsight.services.api.access.access_control import AccessControl, AccessSettings
from farsight.services.api.access.key_file import KeyFile, changed_key_file, read_key_file
from farsight.services.api.access.keys import MAX_KEY_LEN, KeyRing, Role, Tenant, make_key, record_of
from farsight.services.api.access.roles import Access, Everyone, RouteRoles
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.cli import app
from tests.command_line import CliRunner
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, client_on, whole_app


def test_a_ring_knows_its_keys_and_no_others() -> None:
    key, record = make_key("one", "acme", [Role.SERVE], 0.0)
    other, _ = make_key("other", "acme", [Role.ADMIN], 0.0)
    ring = KeyRing([record], {"acme": Tenant("acme", max_in_flight=3)})
    caller = ring.find(key.encode())
    assert caller is not None
    assert (caller.name, caller.tenant.max_in_flight, caller.roles) == ("one", 3, frozenset({Role.SERVE}))
    wrong = [other, "", "fsk", "fsk-", "fsk--", f"fsk-{record.id}-", key[:-1], f"{key}x", key.upper(), f" {key}"]
    wrong += [f"{key}\0", f"fsk-{record.id}-{other.split('-', 2)[2]}", "fsk-\0-\0", "x" * (MAX_KEY_LEN + 1)]
    assert [ring.find(each.encode()) for each in wrong] == [None] * len(wrong)


def test_an_unknown_id_takes_the_same_work_as_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time of a refusal does not tell which ids there are; the digests are compared in constant time."""
    key, record = make_key("one", "one", [Role.SERVE], 0.0)
    ring = KeyRing([record, record_of("own", "own", "own", [Role.ADMIN])])
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return first == second

    monkeypatch.setattr("farsight.services.api.access.keys.hmac.compare_digest", compare)
    for wrong in (f"{key[:-1]}!", f"fsk-{'0' * 12}-{key.split('-', 2)[2]}"):
        compared.clear()
        assert ring.find(wrong.encode()) is None
        assert [len(each) for pair in compared for each in pair] == [32] * 4


def test_an_admin_key_allows_everything_and_the_operators_own_key_is_found() -> None:
    ring = KeyRing([record_of("own key of mine", "api-key", "default", [Role.ADMIN])])
    caller = ring.find(b"own key of mine")
    assert caller is not None
    assert caller.roles == set(Role)
    assert ring.find(b"own key of mine.") is None
    same = record_of("own key of mine", "api-key", "default", [Role.ADMIN])
    assert same.digest != record_of("own key of mine", "api-key", "default", [Role.ADMIN]).digest, "each has its salt"


def test_neither_the_file_nor_a_repr_holds_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "one")
    secret = key.split("-", 2)[2]
    assert secret not in path.read_text()
    (record,) = read_key_file(path).keys
    assert record.digest.hex() not in repr(record)
    assert (path.stat().st_mode & 0o777, record.matches(key.encode())) == (0o600, True)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "one")
    for mode in (0o640, 0o604, 0o622):
        path.chmod(mode)
        with pytest.raises(FarsightError, match="chmod 600"):
            read_key_file(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version: got 2, expected 1"),
        ({"more": 1}, "more"),
        ({"keys": {}}, "keys"),
        ({"keys": [{"id": "x"}]}, r"keys\[0\]\.name"),
        ({"tenants": {"a": {"requests_per_minute": -1}}}, r"tenants\.a\.requests_per_minute: got -1"),
        ({"tenants": {"a": {"requests_per_minute": True}}}, r"tenants\.a\.requests_per_minute"),
        ({"tenants": {"a": {"weight": 0}}}, r"tenants\.a\.weight"),
        ({"tenants": {"a": {"weight": float("nan")}}}, r"tenants\.a\.weight"),
        ({"tenants": {"a": {"priority_min": 3, "priority_max": 2}}}, r"priority_min: got 3, expected at most"),
        ({"tenants": {"a": {"rpm": 3}}}, r"tenants\.a\.rpm"),
        ({"tenants": {"../a": {}}}, "letters"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"version": 1, "tenants": {}, "keys": [], **change}))
    path.chmod(0o600)
    with pytest.raises(FarsightError, match=words):
        read_key_file(path)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"version": 1'])
def test_what_is_no_key_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(FarsightError, match=re.escape(str(path))):
        read_key_file(path)


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "one")
    before = path.read_bytes()
    with pytest.raises(RuntimeError), changed_key_file(path) as content:
        content[0] = KeyFile()
        raise RuntimeError
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"keys.json", ".keys.json.lock"}


def _add_ten(path: str, prefix: str) -> None:
    for number in range(10):
        add_key(Path(path), f"{prefix}{number}")


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_ten, args=(str(path), prefix)) for prefix in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_key_file(path).keys) == 30


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_adds_lists_and_revokes(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    code, key, note = run("add", "alice", "--key-file", path, "--tenant", "acme", "--requests-per-minute", "60")
    assert (code, "only time" in note) == (0, True)
    assert run("add", "bob", "--key-file", path, "--role", "observe", "--role", "serve")[0] == 0
    ring = KeyRing(read_key_file(Path(path)).keys, read_key_file(Path(path)).tenants)
    alice = ring.find(key.strip().encode())
    assert alice is not None
    assert (alice.tenant.name, alice.tenant.requests_per_minute) == ("acme", 60)
    rows = json.loads(run("list", "--key-file", path, "--json")[1])
    assert [(row["name"], row["tenant"], row["roles"]) for row in rows] == [
        ("alice", "acme", ["serve"]),
        ("bob", "bob", ["observe", "serve"]),
    ]
    assert rows[0]["limits"] == {"requests_per_minute": 60}
    assert key.strip().split("-", 2)[2] not in run("list", "--key-file", path)[1]
    assert run("revoke", "alice", "--key-file", path)[:2] == (0, "revoked alice\n")
    assert [each.name for each in read_key_file(Path(path)).keys] == ["bob"]


def test_the_command_refuses_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSIGHT_KEY_FILE", raising=False)
    path = str(tmp_path / "keys.json")
    assert "pass --key-file FILE" in run("add", "alice")[2]
    assert "NAME: got '../x'" in run("add", "../x", "--key-file", path)[2]
    assert run("add", "alice", "--key-file", path)[0] == 0
    assert "a name that no other key has" in run("add", "alice", "--key-file", path)[2]
    assert "--weight: got -1.0" in run("add", "b", "--key-file", path, "--tenant", "alice", "--weight", "-1")[2]
    assert "a key in the file: alice" in run("revoke", "carol", "--key-file", path)[2]
    assert "cannot be written" in run("add", "alice", "--key-file", str(tmp_path / "none" / "keys.json"))[2]
    assert len(read_key_file(Path(path)).keys) == 1


async def test_only_operators_learn_where_the_model_lies(encoder: PromptEncoder, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {role: add_key(path, role.value, role) for role in Role}
    backend = ScriptedBackend()
    backend.model = replace(backend.model, root="/models/here")

    async def roots(key_file: Path | None, key: str = "") -> set[str | None]:
        client = client_on(
            whole_app(backend, encoder, access=AccessControl(AccessSettings(key_file=key_file))), **{"x-api-key": key}
        )
        listed = (await client.get("/v1/models")).json()["data"]
        return {each["root"] for each in [*listed, (await client.get(f"/v1/models/{MODEL}")).json()]}

    assert await roots(path, keys[Role.SERVE]) == {None}
    for role in (Role.OBSERVE, Role.ADMIN):
        assert await roots(path, keys[role]) == {"/models/here"}
    assert await roots(None) == {"/models/here"}, "without keys every client is an operator"


ROUTES = RouteRoles(["/health", "/admin/scale"])


@pytest.mark.parametrize(
    ("root", "path", "role"),
    [
        ("", "/admin/scale", Role.ADMIN),
        ("/app", "/app/admin/scale", Role.ADMIN),
        ("/app", "/admin/scale", Role.ADMIN),
        ("/app", "/app/health", Everyone.PUBLIC),
        ("/health", "/health/admin/scale", Role.ADMIN),
        ("/app", "/apphealth", Everyone.ANY_KEY),
        ("/app/", "/app/health", Everyone.ANY_KEY),
        ("/app", "/app", Everyone.ANY_KEY),
    ],
)
def test_a_root_path_opens_nothing(root: str, path: str, role: Access) -> None:
    assert ROUTES.of({"type": "http", "path": path, "root_path": root}) is role
