"""Bookkeeping of KV blocks and of what a worker may do inside a plan. No tensors, no clock, no I/O."""

from farsight.kvcache.block_manager import BlockManager
from farsight.kvcache.executor import PlanExecutor, SequenceState
from farsight.kvcache.lease import LeaseExecutor
from farsight.kvcache.pipelined import PipelinedExecutor
from farsight.kvcache.static import StaticExecutor
from farsight.kvcache.step_batch import BatchLimits, KVCopy, Padding, StepBatch, StepItem

__all__ = [
    "BatchLimits",
    "BlockManager",
    "KVCopy",
    "LeaseExecutor",
    "Padding",
    "PipelinedExecutor",
    "PlanExecutor",
    "SequenceState",
    "StaticExecutor",
    "StepBatch",
    "StepItem",
]
