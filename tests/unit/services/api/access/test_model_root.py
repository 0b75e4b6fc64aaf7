"""Where the served model and its tokenizer lie, for the operators among the clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx

from services.api.access.door import Door, DoorSettings
from services.api.access.keys import Role
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.access.access_support import add_key
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, whole_app


async def test_only_operators_learn_where_the_model_lies(encoder: PromptEncoder, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {role: add_key(path, role.value, role) for role in Role}
    backend = ScriptedBackend()
    backend.model = replace(backend.model, root="/models/here")

    async def roots(key_file: Path | None, key: str = "") -> set[str | None]:
        app = whole_app(backend, encoder, door=Door(DoorSettings(key_file=key_file)))
        headers = {"x-api-key": key} if key else {}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", headers=headers
        ) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            return {each["root"] for each in [*listed, (await client.get(f"/v1/models/{MODEL}")).json()]}

    assert await roots(path, keys[Role.SERVE]) == {None}
    for role in (Role.OBSERVE, Role.ADMIN):
        assert await roots(path, keys[role]) == {"/models/here"}
    assert await roots(None) == {"/models/here"}, "without keys every client is an operator"
