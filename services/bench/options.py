"""The options of ``farsight bench`` and their checks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.core.errors import ConfigError, FarsightError
from farsight.services.bench.answers import Sla, parse_sla
from farsight.services.bench.targets import PATHS, BodyForm, Endpoint
from farsight.services.bench.workloads import NUM_GROUPS, PREFIX_TOKENS, WORKLOADS

DEFAULT_WORKLOAD = "skewed"
DEFAULT_CONCURRENCY = 32

CHATS: Mapping[str, Any] = {
    "endpoint": "chat", "temperature": 0.8, "top_p": 0.95, "max_output_tokens": 512, "ignore_eos": False
}  # fmt: skip
"""What goes with ``chat_texts``: the settings that people send, and answers that end by themselves."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of ``farsight bench`` by name; ``check_options`` checks their combinations.

    Attributes:
        url: Servers; several are compared.
        label: Names of the servers in tables, one for each server or none.
        model: One for all servers, one for each, or none to ask each server.
        server_pid: Process ids, one for each server or none.
        workload: Names of workloads; if empty, ``skewed`` unless a file is given.
        conversations: Conversations take turns (``workloads.make_conversations``), as many as ``concurrency`` says.
        chat_texts: File of chats; the settings of ``CHATS`` go with it.
        concurrency: Requests in flight of each closed loop; 32 if empty and without ``rate`` and ``trace``.
        salt: Makes the prompts of this call differ from those of other calls; None draws one.
        sla: As ``parse_sla`` takes it.
        extra_body: A JSON object.
        timeout: Seconds for a request.
        json: File for all numbers.
        plots: Directory for plots.
    """

    url: tuple[str, ...]
    label: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    server_pid: tuple[int, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = "completions"
    workload: tuple[str, ...] = ()
    trace: Path | None = None
    texts: Path | None = None
    chat_texts: Path | None = None
    prefix_groups: Path | None = None
    conversations: bool = False
    num_requests: int = 256
    concurrency: tuple[int, ...] = ()
    rate: float | None = None
    cv: float | None = None
    time_scale: float | None = None
    warm_up: int = 32
    seed: int = 1
    repeats: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    usage: bool = True
    extra_body: str | None = None
    timeout: float = 600.0
    keep_alive: bool = False
    vocab_size: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    output_tokens: int = 128
    num_groups: int = NUM_GROUPS
    prefix_tokens: int = PREFIX_TOKENS
    same_prompts: bool = False
    salt: int | None = None
    hide_lengths: bool = False
    sla: str | None = None
    json: Path | None = None
    plots: Path | None = None

    @property
    def file(self) -> Path | None:
        """The file that requests come from, if any."""
        return self.trace or self.texts or self.chat_texts or self.prefix_groups

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of the drawn workloads; empty if requests come from a file."""
        return () if self.file else self.workload or (DEFAULT_WORKLOAD,)

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Requests in flight of each closed loop; empty for an open loop."""
        if self.rate is not None or (self.trace is not None and not self.concurrency):
            return ()
        return self.concurrency or (DEFAULT_CONCURRENCY,)


def check_options(options: BenchOptions) -> None:
    """Refuses options that cannot be used together or at all.

    Raises:
        ConfigError: An option is wrong; names the option, its value and the right one.
    """
    _check_numbers(options)
    _check_servers(options)
    _check_source(options)
    _check_load(options)
    _check_bodies(options)
    if options.plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise FarsightError("--plots needs matplotlib, which is not installed: pip install 'farsight[bench]'")
    _check_outputs(options)


def _check_outputs(options: BenchOptions) -> None:
    """Checks that output files can be written before anything is measured."""
    for name, path in (("json", options.json), ("plots", options.plots)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name}", str(path), "a path in an existing directory")
    if options.json is not None and options.json.is_dir():
        raise ConfigError("--json", str(options.json), "a file, not a directory")
    if options.plots is not None and options.plots.exists() and not options.plots.is_dir():
        raise ConfigError("--plots", str(options.plots), "a directory, new or not")


def _check_numbers(options: BenchOptions) -> None:
    least: dict[str, int] = {"num_requests": 1, "repeats": 1, "warm_up": 0, "output_tokens": 1, "num_groups": 1}
    least |= {"prefix_tokens": 1, "max_prompt_tokens": 1, "max_output_tokens": 1, "temperature": 0, "cv": 0}
    least |= {"salt": 0, "seed": 0, "vocab_size": 4}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ConfigError(_flag(name), value, f"{bound} or more")
    for name in ("rate", "time_scale", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(_flag(name), value, "a number above 0")
    if not 0 < options.top_p <= 1:
        raise ConfigError("--top-p", options.top_p, "a number above 0, at most 1")
    for value in options.concurrency:
        if value < 1:
            raise ConfigError("--concurrency", value, "1 or more")


def _check_servers(options: BenchOptions) -> None:
    for url in options.url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("--url", url, "the address of a server, as http://127.0.0.1:8000")
    num = len(options.url)
    if not num:
        raise ConfigError("--url", options.url, "the address of at least one server")
    _check_count("label", options.label, (0, num))
    _check_count("model", options.model, (0, 1, num))
    _check_count("server_pid", options.server_pid, (0, num))
    if len(set(options.label)) != len(options.label):
        raise ConfigError("--label", options.label, "a different label for each --url")


def _check_count(name: str, values: Sequence[Any], allowed: tuple[int, ...]) -> None:
    if len(values) not in allowed:
        raise ConfigError(_flag(name), list(values), f"{' or '.join(map(str, allowed))} values, as there are --url")


def _check_source(options: BenchOptions) -> None:
    names = ("trace", "texts", "chat_texts", "prefix_groups")
    files = [_flag(name) for name in names if getattr(options, name) is not None]
    files += ["--conversations"] if options.conversations else []
    if len(files) > 1 or (files and options.workload):
        given = [*files, *(["--workload"] if options.workload else [])]
        raise ConfigError(" ".join(given), "all of them", "one source of requests")
    for name in options.workload:
        if name not in WORKLOADS:
            raise ConfigError("--workload", name, f"one of {', '.join(WORKLOADS)}")


def _check_load(options: BenchOptions) -> None:
    if options.concurrency and options.rate is not None:
        raise ConfigError("--rate", options.rate, "not to be given with --concurrency: a load is closed or open")
    if "gamma" in options.workload and options.rate is None:
        raise ConfigError("--workload", "gamma", "an open loop; add --rate")
    if options.conversations and options.rate is not None:
        raise ConfigError("--rate", options.rate, "not to be given with --conversations, whose answers set the pace")
    if options.cv is not None and (options.rate is None or options.trace is not None):
        raise ConfigError("--cv", options.cv, "to be given with --rate, and without --trace, which has its own gaps")
    if options.time_scale is not None and (options.trace is None or options.rate is not None or options.concurrency):
        raise ConfigError("--time-scale", options.time_scale, "to be given with --trace, without --rate, --concurrency")


def _check_bodies(options: BenchOptions) -> None:
    if options.endpoint not in PATHS:
        raise ConfigError("--endpoint", options.endpoint, " or ".join(PATHS))
    if options.chat_texts is not None and options.endpoint != "chat":
        raise ConfigError("--endpoint", options.endpoint, "chat, for --chat-texts")
    if options.vocab_size is not None and (options.endpoint == "chat" or options.texts or options.prefix_groups):
        raise ConfigError("--vocab-size", options.vocab_size, "nothing: chats and files of texts are sent as text")
    if options.hide_lengths and not options.ignore_eos:
        raise ConfigError("--hide-lengths", True, "to be given without --no-ignore-eos: the lengths are fixed")
    read_sla(options)
    read_extra_body(options)


def read_sla(options: BenchOptions) -> Sla | None:
    """The service level, or None.

    Raises:
        InvalidValueError: The option cannot be parsed.
    """
    return None if options.sla is None else parse_sla(options.sla)


def read_extra_body(options: BenchOptions) -> dict[str, Any]:
    """Additional fields of every request body.

    Raises:
        ConfigError: It is not a JSON object.
    """
    try:
        extra = json.loads(options.extra_body or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body", options.extra_body, 'a JSON object, as {"top_k": 5}')
    return extra


def body_form(options: BenchOptions, longest_output: int) -> BodyForm:
    """The format in which requests are sent.

    Args:
        longest_output: Longest output of the workload, in tokens.
    """
    return BodyForm(
        endpoint=options.endpoint,
        vocab_size=options.vocab_size,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        usage=options.usage,
        hidden_max_tokens=longest_output if options.hide_lengths else None,
        extra=read_extra_body(options),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
