"""Which class answers for which name. Each is imported only where it is hosted."""

from __future__ import annotations

import importlib

from actors.runtime.component import Component
from actors.runtime.names import ROUTER
from core.config.load import FarsightConfig
from policies.compose import is_batch_mode

_CLASSES = {
    "router": "actors.scheduling.router:Router",
    "scheduler": "actors.scheduling.scheduler:Scheduler",
    "kv-offload-manager": "actors.scheduling.kv_offload_manager:KVOffloadManager",
    "worker": "actors.worker.model_worker:ModelWorker",
    "rank": "actors.worker.rank:Rank",
    "backend": "actors.external.backend:OpenAIBackend",
    "length-predictor": "actors.learning.length_predictor:LengthPredictor",
    "serving-time-estimator": "actors.learning.serving_time_estimator:ServingTimeEstimator",
    "log-store": "actors.log.log_store:LogStore",
    "supervisor": "actors.supervision.supervisor:Supervisor",
}


_BATCHER = "actors.scheduling.batcher:Batcher"
"""What takes requests in, under the Router's name, where idle workers pull them in batches."""


def component_class(name: str, config: FarsightConfig) -> type[Component]:
    """The class of the component of that name, such as ``scheduler-0``."""
    module, _, attribute = _path(name, config).partition(":")
    found: type[Component] = getattr(importlib.import_module(module), attribute)
    return found


def kind_of(name: str, config: FarsightConfig) -> str:
    """The kind of the component of that name, without importing it."""
    return _path(name, config).partition(":")[2]


def _path(name: str, config: FarsightConfig) -> str:
    if name == ROUTER and is_batch_mode(config.scheduler.preset):
        return _BATCHER
    return _CLASSES[name if name in _CLASSES else name.rpartition("-")[0]]
