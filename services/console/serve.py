"""``farsight serve``: the flags of a server, under Farsight's names and vLLM's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from farsight.core.config.load import load_config
from farsight.core.errors import ConfigError
from farsight.engine.checkpoint.catalogue import catalogue
from farsight.services.commands.ask import KEY_VARIABLE
from farsight.services.commands.keys import FILE_VARIABLE
from farsight.services.commands.pull import fetch_missing
from farsight.services.launch.failures import failing_in_lines
from farsight.services.launch.machine import check_own_gpus
from farsight.services.one_line_errors import naming_flags
from farsight.services.settings import overrides_of

ENVIRONMENT = "FARSIGHT"
"""Every flag of ``serve`` may be given as an environment variable: ``--kv-memory`` as ``FARSIGHT_KV_MEMORY``."""

EXAMPLES = """Examples:

farsight serve   (the embedded model)

farsight serve smollm2 --port 9000

farsight serve ./model.gguf --weights int4 --preset farsight

FARSIGHT_API_KEY=secret farsight serve OWNER/NAME --host 0.0.0.0

Each flag may be an environment variable: --kv-memory is FARSIGHT_KV_MEMORY. A flag goes before the variable, and the
variable before the file of --config."""


def _panel(title: str) -> Callable[..., Any]:
    """Returns what declares an option below this title of ``--help``."""
    return functools.partial(typer.Option, rich_help_panel=title)


_model, _engine, _scheduling = _panel("Model"), _panel("Memory and processors"), _panel("Scheduling")
_processes, _http, _access, _log = _panel("Processes"), _panel("HTTP"), _panel("Who may ask"), _panel("What it tells")


def ignore_service_links() -> None:
    """Forgets ``FARSIGHT_PORT`` where Kubernetes has set it to the address of a Service that is called ``farsight``."""
    if "://" in os.environ.get("FARSIGHT_PORT", ""):
        del os.environ["FARSIGHT_PORT"]


def model_names(incomplete: str) -> list[str]:
    """Returns the models of the catalogue that begin so, for the completion of shells."""
    return [name for name in catalogue() if name.startswith(incomplete)]


def serve(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model, as in --model.", autocompletion=model_names),
    ] = None,
    model: Annotated[
        str | None,
        _model(help="Name that `farsight models` lists, directory, GGUF file or hub id; default: the embedded model."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, _model(help="Name that clients ask for; several times for several names.")
    ] = None,
    chat_template: Annotated[Path | None, _model(help="File of a chat template, not the model's own.")] = None,
    tool_format: Annotated[
        str | None,
        _model(
            "--tool-format",
            "--tool-call-parser",
            help="How the model writes tool calls; default: found from the chat template.",
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="As ever: models may always call.", hidden=True)
    ] = False,
    dtype: Annotated[str | None, _model(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[
        str | None,
        _engine(help="cpu, cuda, or emulated:PROFILE (takes a device's time, computes nothing); default: cpu."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override it.")] = None,
    host: Annotated[str | None, _http(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, _http(help="Port to listen on; default: 8000.")] = None,
    weights: Annotated[
        str | None, _model(help="Bits of the weights: full, float, int8 or int4; default: what the preset says.")
    ] = None,
    kv_dtype: Annotated[
        str | None, _engine(help="Type of keys and values: auto (the model's) or int8; default: auto.")
    ] = None,
    kv_memory: Annotated[str | None, _engine(help="KV pool, as 512MiB or 2GiB; default: auto.")] = None,
    swap_space: Annotated[
        float | None, _engine(min=0, help="GiB of host memory that KV may move to; 0 for none.")
    ] = None,
    disk_kv: Annotated[
        Path | None, _engine(help="Folder that keeps the KV of conversations, also over restarts; default: none.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, _engine(help="Share of a GPU's memory that may be taken; default: 0.9.")
    ] = None,
    block_size: Annotated[int | None, _engine(help="Tokens in a KV block; default: by the device.")] = None,
    max_model_len: Annotated[
        int | None, _engine(help="Longest sequence, in tokens; default: the model's context.")
    ] = None,
    max_num_seqs: Annotated[int | None, _scheduling(help="Most sequences in one step; default: 128.")] = None,
    max_batch_tokens: Annotated[
        int | None,
        _scheduling(
            "--max-batch-tokens",
            "--max-num-batched-tokens",
            help="Most tokens computed in one step; longer prompts take several; default: 1024.",
        ),
    ] = None,
    threads: Annotated[
        int | None, _engine(help="Compute threads of a replica; default: the cores but one, shared by replicas.")
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        _engine(
            "--prefix-cache/--no-prefix-cache",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share the KV of equal prompt prefixes.",
        ),
    ] = None,
    preset: Annotated[str | None, _scheduling(help="Scheduling preset; default: fcfs.")] = None,
    execution: Annotated[
        str | None,
        _scheduling(help="How formed batches run: ragged (the default), or static (padded, returned together)."),
    ] = None,
    replicas: Annotated[
        int | None, _processes("--replicas", "--data-parallel-size", help="Number of model replicas; default: 1.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        _processes(
            "--tensor-parallel", "--tensor-parallel-size", help="Number of processes that share each layer; default: 1."
        ),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        _processes("--pipeline-parallel", "--pipeline-parallel-size", help="Number of pipeline stages; default: 1."),
    ] = None,
    expert_parallel: Annotated[
        bool | None,
        _processes(
            "--expert-parallel",
            "--enable-expert-parallel",
            help="With --tensor-parallel: each process has some of a mixture's experts, not a share of every expert.",
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        _processes(help="Most replicas that autoscaling by predicted queue delay may start; default: --replicas."),
    ] = None,
    placement: Annotated[
        str | None, _processes(help="Which components share a process: auto, fused, split or packed.")
    ] = None,
    predictor: Annotated[
        Path | None,
        _scheduling(help="Output-length predictor written by `farsight train`; default: history of recent outputs."),
    ] = None,
    predictor_encoder: Annotated[
        str | None,
        _scheduling(
            help="Text encoder of the predictor: directory, hub id, minilm (offline) or auto; behind "
            "sentence-transformers: that library computes it. Default: that of its training, or none."
        ),
    ] = None,
    proxy: Annotated[str | None, _http(help="HTTP proxy: auto, serve or haproxy.")] = None,
    drain_s: Annotated[
        float | None, _http(help="Seconds that open requests have to end after TERM; default: 30.")
    ] = None,
    log_format: Annotated[
        str | None, _log(help="Lines of the log: text, or json (an object a line); default: text.")
    ] = None,
    log_level: Annotated[
        str | None,
        _log(help="Least level of its lines: warning, info or debug (what a start costs); default: warning."),
    ] = None,
    access_log: Annotated[
        bool | None, _log("--access-log", help="A line for each request, with the id of its answer.")
    ] = None,
    api_key: Annotated[
        str | None,
        _access(envvar=KEY_VARIABLE, help="The one key that opens this server, besides those of --key-file."),
    ] = None,
    key_file: Annotated[
        Path | None, _access(envvar=FILE_VARIABLE, help="File of API keys that `farsight keys` writes.")
    ] = None,
    insecure: Annotated[
        bool | None, _access("--insecure", help="Serve without keys on an address that other machines reach.")
    ] = None,
    tls_cert: Annotated[
        Path | None, _access("--tls-cert", "--ssl-certfile", help="TLS certificate chain in PEM; serves HTTPS.")
    ] = None,
    tls_key: Annotated[
        Path | None, _access("--tls-key", "--ssl-keyfile", help="Private key of --tls-cert in PEM.")
    ] = None,
    allow_image_urls: Annotated[
        str | None,
        _access(
            metavar="HOST,...",
            help="Hosts that pictures may be fetched from, as pictures.example.org or HOST:PORT; default: none.",
        ),
    ] = None,
    benchmark_mode: Annotated[
        bool | None,
        _scheduling(
            "--benchmark-mode", help="To measure: requests may set exact output lengths, and no queue is too long."
        ),
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API until Ctrl-C, or until TERM and the end of open requests."""
    given: dict[str, Any] = dict(locals())
    for apart in ("context", "name", "config", "api_key", "enable_auto_tool_choice"):
        del given[apart]
    source = context.get_parameter_source("model")
    both = name is not None and source is not None and source.name == "COMMANDLINE"
    overrides = overrides_of(given | {"model": name or model})
    if api_key is not None:
        os.environ[KEY_VARIABLE] = api_key  # Ingress replicas read it from there, as they do under `serve deploy`.
    with failing_in_lines("serve"), naming_flags(overrides):
        if both:
            raise ConfigError("--model", model, f"none beside the model {name!r}")
        settings = load_config(config, overrides)
        check_own_gpus(settings)  # before the imports of what starts a server, which take over a second
        from farsight.services.launch.failures import in_format
        from farsight.services.launch.launch import run_service
        from farsight.services.launch.signals import StopSignal

        say = in_format(typer.echo, settings.server.log_format)
        fetch_missing(settings.model.path, say, quiet=settings.server.log_format != "text")
        run_service(settings, say, StopSignal())
    say("Stopped.")
