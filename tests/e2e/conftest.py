"""One real server for all tests of this directory, on the embedded model; tests that break a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import Server, one_ingress, start_server
from tests.stage import on_stage

HERE = "tests/e2e/"
TIMEOUT_S = 900.0
"""The first test that wants a server waits for its start as well, which takes long on a busy machine."""


DAILY = {
    "test_serving.py": "",
    "test_openai_client.py": "",
    "test_openai_models.py": "",
    "test_bad_input.py": "",
    "test_tools.py": "",
    "test_embedded_model.py": "test_held_out_inputs_are_answered_right",
    "test_hygiene.py": "",
    "test_chaos.py": "test_every_stream_survives_the_death_of_what_none_can_do_without",
    "test_stop.py": "test_term_refuses_new_requests_lets_open_ones_end_and_tells_the_rest",
    "test_serve_deploy.py": "test_deploy_and_down",
    "test_batch.py": "test_whole_run_says_what_a_user_wants_to_know",
}
"""What ``make test`` takes of the tests here, by file, and the one test of a file that it takes: five starts in all.

The other ones start a server each, of a kind whose parts tests of another level reach: they are nightly.
"""


def _is_daily(item: pytest.Item) -> bool:
    if item.path.parent.name == "pages":
        return True
    only = DAILY.get(item.path.name)
    return only is not None and item.name.startswith(only)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.startswith(HERE):
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if not _is_daily(item):
            item.add_marker(pytest.mark.nightly)


@on_stage()
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("log")
    running = start_server(folder / "server.log", *one_ingress(folder), "--log-level", "debug")
    yield running
    running.stop()


@pytest.fixture
def base_url(server: Server) -> str:
    return server.base_url


@pytest.fixture
def model_name() -> str:
    return EMBEDDED_NAME
