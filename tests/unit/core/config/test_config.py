"""Configuration: defaults, file, flags; a wrong key or value is named together with what would be right."""

from __future__ import annotations

import ipaddress
import pickle
from pathlib import Path
from typing import Any

import pytest

from farsight.core.config.images import ImageHost, host_of, is_private_host, is_public, parse_image_hosts
from farsight.core.config.learning import LogConfig
from farsight.core.config.load import FarsightConfig, load_config
from farsight.core.config.server import ServerConfig
from farsight.core.errors import CapacityError, ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "farsight.toml"
    path.write_text(text)
    return path


def test_flags_override_the_file_and_none_overrides_nothing(tmp_path: Path) -> None:
    assert load_config(None, {}) == FarsightConfig()
    text = '[server]\nport = 9000\nhost = "127.0.0.2"\n[scheduler]\nwatermark = 1\n[log]\npath = "log.sqlite"\n'
    path = write(tmp_path, text)
    flags: dict[str, dict[str, Any]] = {
        "server": {"port": 9001, "host": None},
        "model": {"dtype": "bfloat16"},
        "engine": {"benchmark_mode": True},
    }
    config = load_config(path, flags)
    assert config.engine.benchmark_mode
    assert (config.server.port, config.server.host) == (9001, "127.0.0.2")
    assert config.scheduler.watermark == 1.0
    assert (config.model.dtype, config.log.path) == ("bfloat16", "log.sqlite")
    with pytest.raises(ConfigError, match=r"--config.*readable TOML file"):
        load_config(tmp_path / "none.toml", {})
    paths = ("", "redis", "redis://h", "rediss://h")
    assert [LogConfig(path).on_redis for path in paths] == [False, False, True, True]


SERVER = '[[replica]]\nbackend = "openai"\nurl = "http://host:8000/v1/"\n'

WRONG = [
    ("[server]\nprot = 1", "server.prot", "did you mean 'port'?"),
    ("[servr]\nport = 1", "servr", "did you mean 'server'?"),
    ("[server]\nzzz = 1", "server.zzz", "one of host"),
    ("server = 3", "server", "a table"),
    ('[server]\nport = "80"', "server.port", "type int"),
    ("[server]\nport = true", "server.port", "type int"),
    ("[server]\nport = 70000", "server.port", "65535"),
    ("[scheduler]\nwatermark = 0.0", "scheduler.watermark", "<= 1"),
    ("[scheduler]\nwatermark = nan", "scheduler.watermark", "type float"),
    ("[placement]\nwindow_s = 0", "placement.window_s", "> 0"),
    ("[placement]\nrebalance_ratio = 0.5", "placement.rebalance_ratio", ">= 1"),
    ("[placement]\nbalance = 1", "placement.balance", "type bool"),
    ("[batch]\nbatch_size = -1", "batch.batch_size", ">= 0"),
    ("[batch]\nnum_bins = 0", "batch.num_bins", ">= 1"),
    ("[batch]\nwma_threshold = -1.0", "batch.wma_threshold", ">= 0"),
    ("[batch]\nreload_s = -1.0", "batch.reload_s", "seconds >= 0"),
    ("[batch]\nforecast_wait_s = -0.1", "batch.forecast_wait_s", "seconds >= 0"),
    ("[batch]\nlearn_every_s = 0.0", "batch.learn_every_s", "seconds > 0"),
    ("[batch]\nlearn_min_error_s = -1.0", "batch.learn_min_error_s", ">= 0"),
    ("[predictor]\nlearn_min_share = -1.0", "predictor.learn_min_share", ">= 0"),
    ("[batch]\nmax_wait_s = inf", "batch.max_wait_s", "type float"),
    ('[scheduler]\nexecution = "padded"', "scheduler.execution", "one of ragged, static"),
    ("[engine]\nblock_size = -1", "engine.block_size", ">= 0"),
    ('[engine]\nhost_kv_memory = "much"', "engine.host_kv_memory", "auto, or 0 for none"),
    ("[engine]\nmax_model_len = -1", "engine.max_model_len", ">= 0"),
    ('[engine]\ndevice = "gpu"', "engine.device", "emulated:PROFILE"),
    ('[engine]\nbackend = "xformers"', "engine.device", "cuda"),
    ('[engine]\nbackend = "triton"', "engine.device", "cuda"),
    ('[engine]\ndevice = "cuda"\nbackend = "native"', "engine.backend", "xformers"),
    ('[engine]\ndevice = "cuda"\nbackend = "xformers"\nblock_size = 96', "engine.block_size", "multiple of 64"),
    ("[engine]\ngpu_memory_utilization = 1.5", "engine.gpu_memory_utilization", "<= 1"),
    ('[engine]\nweights = "int3"', "engine.weights", "one of auto, full, float, int8, int4"),
    ('[engine]\ndevice = "emulated:"', "engine.device", "emulated:a100-7b"),
    ('[model]\ndtype = "fp8"', "model.dtype", "bfloat16"),
    ("[model]\nreplicas = 3\nmax_replicas = 2", "model.max_replicas", "0, or at least 3"),
    ("[model]\nmin_replicas = 2\nmax_replicas = 1", "model.max_replicas", "0, or at least 2"),
    ("[model]\nmin_replicas = 2\nmax_replicas = 4", "model.min_replicas", "<= 1"),
    ("[model]\nmin_replicas = 0", "model.min_replicas", ">= 1"),
    ("[model]\ntarget_queue_delay_s = 0", "model.target_queue_delay_s", "> 0"),
    ("[model]\nscale_down_after_s = -1", "model.scale_down_after_s", "> 0"),
    ('[actors]\nplacement = "fuse"', "actors.placement", "one of auto, together, fused, split"),
    ("[actors]\nlength_predictors = 0", "actors.length_predictors", ">= 1"),
    ("[actors]\nserving_time_estimators = 0", "actors.serving_time_estimators", ">= 1"),
    ("[actors]\nserving_time_estimators = 1.0", "actors.serving_time_estimators", "type int"),
    ("[actors]\nscheduler_delay_s = -0.1", "actors.scheduler_delay_s", ">= 0"),
    ("[actors]\nscheduler_delay_s = inf", "actors.scheduler_delay_s", "type float"),
    ("[actors]\nsilence_s = 0.5", "actors.silence_s", "seconds, at least 1"),
    ("[actors]\nstep_stall_s = 0", "actors.step_stall_s", "seconds, at least 1"),
    ("[actors]\nfailing_steps = 0", "actors.failing_steps", ">= 1"),
    ("[actors]\nplacment = 1", "actors.placment", "did you mean 'placement'?"),
    ("[images]\nencoders = 0", "images.encoders", ">= 1"),
    ('[images]\ndevice = "tpu"', "images.device", "one of cpu, cuda"),
    ("[images]\ncache_mib = -1", "images.cache_mib", ">= 0"),
    ("[images]\nwait_s = 0", "images.wait_s", "> 0"),
    ("[log]\nmax_rows = 0", "log.max_rows", ">= 1"),
    ("[log]\npath = 3", "log.path", "type str"),
    ("[log]\nmax_artefacts = 0", "log.max_artefacts", ">= 1"),
    ('[log]\npath = "http://127.0.0.1"', "log.path", "redis://"),
    ("[log]\nmax_row = 3", "log.max_row", "did you mean 'max_rows'?"),
    ("[server\n", "--config", "valid TOML"),
    ("[replica]\nurl = 1", "replica", "an array of tables"),
    ("[[replica]]\nurl = 1", "replica.url", "type str"),
    ('[[replica]]\nurl = "http://host"', "replica.backend", "one of openai; replicas of our own engine are counted"),
    (SERVER + "max_seqs = 1", "replica.max_seqs", "did you mean 'max_num_seqs'?"),
    (SERVER + "max_num_seqs = 0", "replica.max_num_seqs", ">= 1"),
    (SERVER + "max_model_len = -1", "replica.max_model_len", ">= 0"),
    (SERVER + "token_timeout_s = 0", "replica.token_timeout_s", "a number > 0"),
    ("[model]\nreplicas = 0", "model.replicas", "or a [[replica]] table"),
    ("[server]\nfirst_token_deadline_s = 0", "server.first_token_deadline_s", "a number > 0"),
    *(
        (f'[[replica]]\nbackend = "openai"\nurl = "{url}"', "replica.url", "http://host:8000/v1")
        for url in ("", "host:8000", "ftp://host", "http://", "http://me:secret@host", "http://host?x=1")
    ),
]


@pytest.mark.parametrize(("text", "field", "hint"), WRONG, ids=[case[1] for case in WRONG])
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {})
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_errors_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("server.port", 0, "a port")))
    assert (error.field, error.value, error.expected) == ("server.port", 0, "a port")
    full = pickle.loads(pickle.dumps(CapacityError("full", 2.0)))
    assert (str(full), full.retry_after_s) == ("full", 2.0)


def test_other_servers_take_the_place_of_our_own_engine_unless_there_is_one_too(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SERVER + "max_num_seqs = 7\n" + SERVER), {"model": {"replicas": None}})
    assert (config.model.replicas, len(config.replica)) == (0, 2)
    assert (config.replica[0].max_num_seqs, config.replica[0].base_url) == (7, "http://host:8000")
    assert load_config(write(tmp_path, SERVER), {"model": {"replicas": 1}}).model.replicas == 1
    assert load_config(write(tmp_path, SERVER + "[model]\nreplicas = 2"), {}).model.replicas == 2


def test_a_measurement_is_not_refused_for_what_waits() -> None:
    """Bounds that are set stay as they are."""
    measured = load_config(None, {"engine": {"benchmark_mode": True}, "server": {"max_queued_requests": 7}}).server
    assert (measured.max_wait_s, measured.max_queued_tokens, measured.max_queued_requests) == (0.0, 2**40, 7)
    assert load_config(None, {}).server == ServerConfig()


def test_entries_are_names_or_addresses_with_a_port_or_without() -> None:
    found = parse_image_hosts(
        "Pictures.example, a.b:8443,private:store.internal,10.0.0.7:9000,[::1]:81,[2606:4700::1111]"
    )
    assert found == (
        ImageHost("pictures.example", None, may_be_private=False),
        ImageHost("a.b", 8443, may_be_private=False),
        ImageHost("store.internal", None, may_be_private=True),
        ImageHost("10.0.0.7", 9000, may_be_private=True),
        ImageHost("::1", 81, may_be_private=True),
        ImageHost("2606:4700::1111", None, may_be_private=True),
    )
    assert parse_image_hosts("") == ()


@pytest.mark.parametrize(
    "entry",
    [
        "*", "*.example.org", "http://a.example", "a.example/path", "user@a.example", "a.example:0", "a.example:65536",
        "a.example:http", "a..example", ".example", "a.example:", "127.1", "2130706433", "0177.0.0.1", "[a.example]",
        "::1", "[::1", "[fe80::1%eth0]", "169.254.169.254", "0.0.0.0", "224.0.0.1", "[::ffff:169.254.169.254]",
        "private:", "b\u00fccher.example", "a b",
    ],
)  # fmt: skip
def test_other_entries_are_refused_with_the_setting(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"images\.allow_urls"):
        parse_image_hosts(f"a.example,{entry}")


def test_a_host_is_taken_on_its_port_alone() -> None:
    hosts = parse_image_hosts("a.example,a.example:8443")
    taken = {
        (scheme, name, port)
        for scheme in ("http", "https")
        for name in ("a.example", "b.a.example", "example")
        for port in (80, 443, 8443, 0)
        if host_of(hosts, scheme, name, port) is not None
    }
    assert taken == {
        ("http", "a.example", 80),
        ("https", "a.example", 443),
        ("http", "a.example", 8443),
        ("https", "a.example", 8443),
    }


def test_addresses_of_the_internet_are_public_and_those_of_private_networks_are_not() -> None:
    public = ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
    private = ["10.1.2.3", "172.31.0.1", "192.168.0.1", "127.0.0.1", "::1", "fd00::1", "::ffff:10.0.0.1"]
    for text in public + private:
        address = ipaddress.ip_address(text)
        assert (is_public(address), is_private_host(address)) == (text in public, text in private), text
