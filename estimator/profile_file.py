"""The file that ``farsight profile`` writes and simulators read: the cost of steps on one machine, as JSON.

A device may also be described by name, with its sizes, for emulated devices and for the simulator's default.
"""

from __future__ import annotations

import json
import math
import typing
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from farsight.core.config.engine import EMULATED
from farsight.core.costs import A100_7B as A100_7B_COST
from farsight.core.costs import FREE_IMAGES, ImageCost, StepCost
from farsight.core.errors import ConfigError, InvalidValueError

SCHEMA = 1
"""Format version of the file; other versions are refused."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProfiledMachine:
    """Where a profile was measured.

    Attributes:
        model: Directory or hub id.
        num_threads: Compute threads of the worker.
        cpu_share: CPU time over wall time of the measured steps and threads; well below 1, the machine had other work.
    """

    model: str
    dtype: str
    processor: str
    num_cores: int
    num_threads: int
    cpu_share: float


@dataclass(frozen=True, slots=True)
class ProfiledRange:
    """The largest amount of each kind of work in a measured step; beyond it the prices are extrapolated."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    prefill_pairs: int


@dataclass(frozen=True, slots=True)
class HeldBackErrors:
    """|predicted - measured| / measured, over steps that the fit did not use."""

    median: float
    p90: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """The content of the file. A file written by hand needs only the first four fields.

    Attributes:
        base_s: This and the other prices are those of ``StepCost``, in seconds.
        schema: ``SCHEMA``.
        kv_bytes: Bytes of the KV of one token; None where it is not known.
        copy_bandwidth: Bytes a second between device and host, each way; None where it was not measured.
        disk_bandwidth: Bytes a second that a disk brings back; None where it was not measured.
        kv_memory: Bytes that the device has for KV; None where that is not known.
        image_token_s: This and the next two are the prices of ``ImageCost``, in seconds; None where the image encoder
            was not measured.
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float
    prefill_pair_s: float = 0.0
    schema: int = SCHEMA
    kv_bytes: int | None = None
    copy_bandwidth: float | None = None
    disk_bandwidth: float | None = None
    kv_memory: int | None = None
    image_token_s: float | None = None
    image_batch_s: float | None = None
    image_pair_s: float | None = None
    machine: ProfiledMachine | None = None
    range: ProfiledRange | None = None
    error: HeldBackErrors | None = None

    @property
    def cost(self) -> StepCost:
        """The prices."""
        return StepCost(self.base_s, self.prefill_token_s, self.decode_seq_s, self.context_token_s, self.prefill_pair_s)

    @property
    def image_cost(self) -> ImageCost:
        """The prices of pictures."""
        return ImageCost(self.image_batch_s or 0.0, self.image_token_s or 0.0, self.image_pair_s or 0.0)

    def to_json(self) -> str:
        """Returns the known fields as one JSON object."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(known, indent=2, allow_nan=False) + "\n"


def parse_profile(text: str, source: str) -> ProfileFile:
    """Parses a profile.

    Args:
        source: Name of the text's source, for errors.

    Raises:
        InvalidValueError: no JSON object, another schema, a field that is missing, unknown or of a wrong value; it is
            named as ``source: field``.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidValueError(source, text[:20], f"a JSON object ({error})") from error
    schema = values.get("schema", SCHEMA) if isinstance(values, dict) else SCHEMA
    if schema != SCHEMA:
        raise InvalidValueError(f"{source}: schema", schema, f"{SCHEMA}, the only one that this version reads")
    profile = _read(ProfileFile, values, source, prefix="")
    for name in ("base_s", "copy_bandwidth", "disk_bandwidth"):
        if getattr(profile, name) == 0:
            raise InvalidValueError(f"{source}: {name}", 0, "a number above 0")
    return profile


def _read(kind: type[T], values: Any, source: str, prefix: str) -> T:
    """Makes a dataclass from a JSON object of its fields."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise InvalidValueError(f"{source}: {prefix}".rstrip(": ."), values, f"a JSON object with {', '.join(known)}")
    for name in values:
        if name not in known:
            raise InvalidValueError(f"{source}: {prefix}{name}", values[name], f"only {', '.join(known)}")
    hints = typing.get_type_hints(kind)
    found = {}
    for name, field in known.items():
        if name in values:
            found[name] = _read_value(hints[name], values[name], source, f"{prefix}{name}")
        elif field.default is MISSING:
            raise InvalidValueError(f"{source}: {prefix}{name}", None, f"{_phrase(hints[name])}; it is missing")
    return kind(**found)


def _read_value(hint: Any, value: Any, source: str, name: str) -> Any:
    kind = _plain(hint)
    if kind not in _PHRASES:
        return _read(kind, value, source, prefix=f"{name}.")
    right = isinstance(value, str) if kind is str else _is_number(value, whole=kind is int)
    if not right:
        raise InvalidValueError(f"{source}: {name}", value, _phrase(hint))
    return value


def _is_number(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return bool(0 <= value < math.inf)


_PHRASES: dict[Any, str] = {float: "a number >= 0", int: "an integer >= 0", str: "a text"}


def _phrase(hint: Any) -> str:
    return _PHRASES.get(_plain(hint), "a JSON object")


def _plain(hint: Any) -> Any:
    """Returns ``X`` of ``X | None``."""
    return next((each for each in typing.get_args(hint) if each is not type(None)), hint)


_FIELD = "engine.device"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Times and sizes of one device with one model.

    Attributes:
        kv_bytes: Bytes of the KV of one token.
        copy_bandwidth: Bytes a second between device and host, each way; 0 where it is not known.
        kv_memory: Bytes that the device has for KV; 0 where that is not known.
        image_cost: Cost of the image encoder; nothing where that is not known.
        disk_bandwidth: Bytes a second that a disk brings back; 0 where it is not known.
    """

    cost: StepCost
    kv_bytes: int
    copy_bandwidth: float = 0.0
    kv_memory: int = 0
    image_cost: ImageCost = FREE_IMAGES
    disk_bandwidth: float = 0.0


A100_7B = DeviceProfile(
    A100_7B_COST, kv_bytes=512 * 2**10, copy_bandwidth=25e9, kv_memory=60 * 2**30, image_cost=ImageCost(0.004, 3.25e-6)
)
"""A 7B model without grouped heads on an A100. The weights take 12.5 GiB of its 80 GB (74.5 GiB), activations about
2 GiB: 122,880 tokens of KV are left. PCIe 4 moves 25 GB/s each way.
LLaVA 1.5's tower (CLIP ViT-L/14: 304 M parameters, a token for each patch) computes at 0.6 of 312 TFLOP/s, and
a batch of pictures is launched in 4 ms."""

H200_7B = DeviceProfile(
    StepCost(base_s=4.7e-3, prefill_token_s=25e-6, decode_seq_s=2.5e-6, context_token_s=44e-9),
    kv_bytes=128 * 2**10,
    copy_bandwidth=45e9,
    kv_memory=110 * 2**30,
    disk_bandwidth=7e9,
)
"""Mistral 7B in bfloat16 on one H200, as docs/gpu.md measured it: 40,000 prompt tokens a second, 902 k tokens of KV,
45 GB/s each way to the host. 7 GB/s is what one NVMe drive on four lanes of PCIe 4 reads."""

CPU_135M = DeviceProfile(
    StepCost(3.9e-3, 0.49e-3, 0.71e-3, 2.7e-6, 0.49e-6),
    kv_bytes=45 * 2**10,
    copy_bandwidth=8e9,
    kv_memory=2**30,
    disk_bandwidth=1e9,
)
"""SmolLM2-135M in four bits with KV in float32 on two cores: steps as `farsight profile` measured them, memory that is
copied at 8 GB/s, and a drive that reads 1 GB/s."""

DEVICE_PROFILES = {"a100-7b": A100_7B, "h200-7b": H200_7B, "cpu": CPU_135M}
"""The built-in profiles, by name."""


def resolve_device(device: str) -> str:
    """Makes the path of a device's profile absolute, for processes that run elsewhere."""
    name = device.removeprefix(EMULATED)
    return device if name == device or name in DEVICE_PROFILES else f"{EMULATED}{Path(name).expanduser().absolute()}"


def profile_label(profile: str) -> str:
    """Returns the name for display: the profile's name, or its file's; empty for none."""
    return Path(profile).name


def known_cost(profile: str, otherwise: StepCost) -> StepCost:
    """Returns the cost of steps before any was measured: the emulated device's, or ``otherwise`` on a real one.

    Args:
        profile: As ``EngineConfig.profile``.

    Raises:
        ConfigError, InvalidValueError: As ``find_device_profile``.
    """
    return find_device_profile(profile).cost if profile else otherwise


def find_device_profile(name: str) -> DeviceProfile:
    """Finds the profile of this name, or in this file.

    Raises:
        ConfigError: Neither exists, or the file does not give the size of KV.
        InvalidValueError: The file is not a profile; names the field.
    """
    if name in DEVICE_PROFILES:
        return DEVICE_PROFILES[name]
    path = Path(name).expanduser()
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join(f"{EMULATED}{each}" for each in DEVICE_PROFILES)
        expected = f"{known}, or {EMULATED}FILE with what `farsight profile` wrote ({error})"
        raise ConfigError(_FIELD, EMULATED + name, expected) from error
    profile = parse_profile(text, f"{_FIELD} {name}")
    if not profile.kv_bytes:
        raise ConfigError(_FIELD, EMULATED + name, "a profile with kv_bytes above 0, to size the KV pool by")
    return DeviceProfile(
        profile.cost,
        profile.kv_bytes,
        profile.copy_bandwidth or 0.0,
        profile.kv_memory or 0,
        profile.image_cost,
        profile.disk_bandwidth or 0.0,
    )
