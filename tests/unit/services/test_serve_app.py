"""What ``serve deploy`` may say in its file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from farsight.actors.runtime.peer import Site
from farsight.core.config.engine import ModelConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.server import ServerConfig
from farsight.core.errors import ConfigError, FarsightError
from farsight.services.serve_app import check_unchanged, config_from_tables

FILE = Path(__file__).resolve().parents[3] / "deploy" / "serve.yaml"


def test_the_file_in_the_repository_holds_the_defaults() -> None:
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    assert config_from_tables(application["args"]) == FarsightConfig()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"engine": {"kv_memry": "1GiB"}}, "engine.kv_memry: .* did you mean 'kv_memory'"),
        ({"modle": {}}, "modle: .* did you mean 'model'"),
        ({"model": "tiny"}, "model: got 'tiny', expected a table of settings"),
        ({"model": {"replicas": "2"}}, "model.replicas: got '2', expected a value of type int"),
        ({"server": {"port": 9000}}, "server.port: got 9000, expected http_options.port"),
        ({"server": {"proxy": "haproxy"}}, "server.proxy: .* RAY_SERVE_ENABLE_HA_PROXY"),
    ],
)
def test_a_wrong_setting_is_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_tables(tables)


def test_only_the_http_side_may_change_while_components_run() -> None:
    site = Site(FarsightConfig(), "/model", "fused")
    server = dataclasses.replace(site.config, server=ServerConfig(ingress_replicas=3))
    check_unchanged(site, dataclasses.replace(site, config=server))
    model = dataclasses.replace(site.config, model=ModelConfig(dtype="bfloat16"))
    with pytest.raises(FarsightError, match=r"`farsight down` first.*dtype='bfloat16'"):
        check_unchanged(site, dataclasses.replace(site, config=model))
    with pytest.raises(FarsightError, match="placement: 'fused' runs, 'split' is wanted"):
        check_unchanged(site, dataclasses.replace(site, placement="split"))
