"""Bookkeeping of KV blocks and of what a worker may do inside a plan. No tensors, no clock, no I/O."""

from kvcache.block_manager import BlockManager
from kvcache.executor import PlanExecutor, SequenceState
from kvcache.lease import LeaseExecutor
from kvcache.pipelined import PipelinedExecutor
from kvcache.static import StaticExecutor
from kvcache.step_batch import BatchLimits, KVCopy, Padding, StepBatch, StepItem

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
