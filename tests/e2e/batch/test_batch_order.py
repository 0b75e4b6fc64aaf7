"""Lines of two applications on an emulated device: those with the longer forecasts begin first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, start_server, wait_until
from tests.e2e.test_emulated import PROFILE
from tests.e2e.test_forecasts import LENGTHS, config, train

LINES_EACH = 12


def line(number: int, application: str) -> dict[str, Any]:
    body = {
        "model": EMBEDDED_NAME,
        "prompt": f"{application}\nnumber {number}",
        "max_tokens": 400,
        "benchmark_len": LENGTHS[application],
    }
    return {"custom_id": f"{application}{number}", "method": "POST", "url": "/v1/completions", "body": body}


def answers(client: httpx.Client, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a batch of these lines answers."""
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).json()
    fields = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=fields).json()

    def ended() -> bool:
        batch.update(client.get(f"/v1/batches/{batch['id']}").json())
        return batch["status"] == "completed"

    wait_until(ended, "the batch does not end")
    content = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    return [json.loads(each) for each in content.splitlines()]


def test_lines_begin_with_the_longest_forecasts(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(json.dumps(PROFILE))
    settings = config(tmp_path, "[engine]\nmax_num_seqs = 2\n[predictor]\nlearn = false\n")
    flags = ("--device", f"emulated:{tmp_path / 'device.json'}", "--benchmark-mode", "--preset", "farsight")
    server = start_server(tmp_path / "log", *flags, "--predictor", str(train(tmp_path)), *settings)
    lines = [line(number, application) for number in range(LINES_EACH) for application in LENGTHS]
    try:
        with httpx.Client(base_url=server.base_url, timeout=LONG_S) as client:
            found = answers(client, lines)
            begun = {}  # an ingress replica numbers its requests in the order in which they come
            for each in found:
                told = client.get(f"/v1/requests/{each['response']['body']['id']}").json()
                begun[each["custom_id"]] = int(told["choices"][0]["request_id"].rpartition("-")[2])
        assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines], "the order of the input"
        order = sorted(begun, key=begun.__getitem__)
        assert [name.partition(":")[0] for name in order] == ["Tell"] * LINES_EACH + ["Say"] * LINES_EACH
    finally:
        server.stop()
