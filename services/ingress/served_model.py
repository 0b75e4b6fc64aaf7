"""What clients may know about the served model."""

from __future__ import annotations

import time
from pathlib import Path

from farsight.actors.runtime.peer import Site
from farsight.core.abilities import Abilities
from farsight.core.config.load import FarsightConfig
from farsight.core.messages.plans import WorkerReady
from farsight.engine.checkpoint.encoder_config import abilities_of
from farsight.engine.vision.geometry import load_geometry
from farsight.estimator.profile_file import profile_label
from farsight.policies.compose import forecasting_presets, predicts_requests
from farsight.services.api.backend import ImageInput, ModelInfo


def model_info(site: Site, ready: WorkerReady) -> ModelInfo:
    """Returns what clients may know about the model of a replica that is up."""
    return ModelInfo(
        name=site.config.model.name,
        aliases=site.config.model.aliases,
        created=int(time.time()),
        max_model_len=ready.max_model_len,
        pool_limited=ready.pool_limited,
        vocab_size=ready.vocab_size,
        end_ids=ready.end_ids,
        benchmark_mode=site.config.engine.benchmark_mode,
        emulated=profile_label(site.config.engine.profile),
        no_forecasts=why_no_forecasts(site.config),
        abilities=served_abilities(site),
        image_input=served_image_input(site),
        root=site.model_dir,
        preset=site.config.scheduler.preset,
    )


def why_no_forecasts(config: FarsightConfig) -> str:
    """Returns why requests get no forecasts of their own, and what makes them; empty if they get them."""
    if predicts_requests(config):
        return ""
    preset, makers = config.scheduler.preset, forecasting_presets()
    if preset in makers:
        return "Requests get no forecasts of their own: predictor.from_traffic is off, and no --predictor is given."
    made = f"Forecasts come with the presets {', '.join(makers)}, and with any preset under --predictor"
    return f"Preset {preset} makes no forecasts of single requests. {made} (what farsight train wrote)."


def served_abilities(site: Site) -> Abilities:
    """Returns what the replicas of our own engine can do; other servers only generate."""
    if not site.config.model.replicas or site.config.engine.profile:
        return Abilities()
    return abilities_of(Path(site.model_dir))


def served_image_input(site: Site) -> ImageInput | None:
    """Returns how the replicas of our own engine read pictures; None if they do not."""
    geometry = load_geometry(Path(site.model_dir)) if site.sees else None
    if geometry is None:
        return None
    text = f"{geometry.before}{geometry.placeholder}{geometry.after}"
    return ImageInput(text, geometry.placeholder_id, site.config.images.max_per_request)
