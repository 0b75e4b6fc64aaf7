"""A device described by its times and sizes: for emulated devices and for the simulator's default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.config.engine import EMULATED
from core.costs import A100_7B as A100_7B_COST
from core.costs import FREE_IMAGES, ImageCost, StepCost
from core.errors import ConfigError
from estimator.profile_file import parse_profile

_FIELD = "engine.device"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Times and sizes of one device with one model.

    Attributes:
        kv_bytes: Bytes of the KV of one token.
        copy_bandwidth: Bytes a second between device and host, each way; 0 where it is not known.
        kv_memory: Bytes that the device has for KV; 0 where that is not known.
        image_cost: Cost of the image encoder; nothing where that is not known.
    """

    cost: StepCost
    kv_bytes: int
    copy_bandwidth: float = 0.0
    kv_memory: int = 0
    image_cost: ImageCost = FREE_IMAGES


A100_7B = DeviceProfile(
    A100_7B_COST, kv_bytes=512 * 2**10, copy_bandwidth=25e9, kv_memory=60 * 2**30, image_cost=ImageCost(0.004, 3.25e-6)
)
"""A 7B model without grouped heads on an A100. The weights take 12.5 GiB of its 80 GB (74.5 GiB), activations about
2 GiB: 122,880 tokens of KV are left. PCIe 4 moves 25 GB/s each way.
LLaVA 1.5's tower (CLIP ViT-L/14: 304 M parameters, a token for each patch) computes at 0.6 of 312 TFLOP/s, and
a batch of pictures is launched in 4 ms."""

DEVICE_PROFILES = {"a100-7b": A100_7B}
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
    return DeviceProfile(profile.cost, profile.kv_bytes, profile.copy_bandwidth or 0.0, image_cost=profile.image_cost)
