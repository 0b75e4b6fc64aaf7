"""Bookkeeping of KV blocks and of what a worker may do inside a plan. No tensors, no clock, no I/O."""

from kvcache.block_manager import BlockManager
from kvcache.lease import BatchLimits, KVCopy, LeaseExecutor, StepBatch, StepItem

__all__ = ["BatchLimits", "BlockManager", "KVCopy", "LeaseExecutor", "StepBatch", "StepItem"]
