"""A replica scheduler under test, and the messages that tests hand it."""

from __future__ import annotations

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.messages.plans import FinishedSequence, Plan, SlotProgress, StepReport, WorkerReady, WorkerState
from farsight.core.request import Request, SamplingParams, SequenceStatus
from farsight.policies.compose import build_scheduler
from farsight.policies.replica.events import (
    AccountClosed,
    Event,
    Instruction,
    RefuseRequest,
    RequestEnded,
    RequestsArrived,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import MlfqRules, PolicySettings

READY = WorkerReady("w", num_blocks=10, block_size=4, max_model_len=40, pool_limited=True, vocab_size=100)


LEASE = 3


def request(name: str, prompt: int = 4, out: int = 4, attempt: int = 0, resumed: int = 0) -> Request:
    return Request(name, attempt, "i", (1,) * prompt, SamplingParams(out), (2,) * resumed)


def state(
    *held: tuple[Request, SlotProgress],
    ended: tuple[str, ...] = (),
    short: int = 0,
    report_seq: int = 1,
    lease: int = LEASE,
    ready: WorkerReady = READY,
) -> WorkerState:
    """What a worker says when it is taken over."""
    done = tuple(FinishedSequence(name, 0, SequenceStatus.FINISHED_STOPPED, 2) for name in ended)
    progress = tuple(each for _, each in held)
    report = StepReport(ready.worker_incarnation, lease, report_seq, 0, 0, short, progress, done, ())
    return WorkerState(lease, ready, tuple(each for each, _ in held), report)


class Harness:
    """A scheduler whose integrity is checked after every event; keeps the latest plan."""

    tick_s = 1.0
    """Between two events."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        standby_slots: int = 2,
        worker: WorkerState | None = None,
        *,
        preset: str = "fcfs",
        kv: str = "",
        grant_lead_s: float = 0.0,
        offload_deadline_s: float = 0.0,
    ) -> None:
        bounds = SchedulerLimits(
            max_num_seqs, standby_slots, grant_lead_s=grant_lead_s, offload_deadline_s=offload_deadline_s
        )
        self.scheduler = self.build(preset, bounds, kv)
        self.plans: list[Plan] = []
        self.ended: list[RequestEnded] = []
        self.refused: list[RefuseRequest] = []
        self.closed: list[AccountClosed] = []
        self.now = 0.0
        self.handle(WorkerConnected(worker or state()))

    def build(self, preset: str, limits: SchedulerLimits, kv: str) -> ReplicaScheduler:
        config = SchedulerConfig(watermark=1.0, max_gap_ms=0.0, quantum_s=0.01)
        settings = PolicySettings(config, mlfq=MlfqRules(follows_cost=False))
        return build_scheduler(preset, limits, settings, kv=kv)

    def handle(self, event: Event) -> list[Instruction]:
        """What is said beside plans."""
        self.now += self.tick_s
        if isinstance(event, WorkerConnected):
            self.first_report = event.state.report.report_seq
        said: list[Instruction] = []
        for instruction in self.scheduler.handle(event, self.now):
            if not isinstance(instruction, SendPlan):
                said.append(instruction)
            match instruction:
                case SendPlan(plan):
                    self.plans.append(plan)
                case RequestEnded():
                    self.ended.append(instruction)
                case RefuseRequest():
                    self.refused.append(instruction)
                case AccountClosed():
                    self.closed.append(instruction)
        self.scheduler.check_integrity()
        return said

    def arrive(self, *requests: Request) -> list[Instruction]:
        return self.handle(RequestsArrived(requests))

    def report(
        self,
        seq: int,
        *progress: SlotProgress,
        ended: tuple[str, ...] = (),
        short: int = 0,
        plan: int = 0,
        lease: int = LEASE,
    ) -> list[Instruction]:
        """``seq`` counts from the report that came with the latest take-over."""
        done = tuple(FinishedSequence(name, 0, SequenceStatus.FINISHED_STOPPED, 2) for name in ended)
        plan_seq = plan or self.plans[-1].plan_seq
        return self.handle(
            WorkerReported(StepReport("w", lease, self.first_report + seq, plan_seq, 0, short, progress, done, ()))
        )

    @property
    def admitted(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots if not slot.standby]

    @property
    def standby(self) -> list[str]:
        return [slot.request_id for slot in self.plans[-1].slots if slot.standby]


def running(
    name: str, output: int, blocks: int, preemptions: int = 0, *, attempt: int = 0, stalled: bool = False
) -> SlotProgress:
    return SlotProgress(name, attempt, SequenceStatus.RUNNING, preemptions, 4 + output, output, blocks, stalled=stalled)


def waiting(name: str, preemptions: int = 0, *, attempt: int = 0, stalled: bool = False) -> SlotProgress:
    return SlotProgress(name, attempt, SequenceStatus.WAITING, preemptions, 0, 0, 0, stalled=stalled)


def names(h: Harness) -> list[str]:
    return [slot.request_id for slot in h.plans[-1].slots]


def shipped(h: Harness) -> list[str]:
    return [slot.request_id for slot in h.plans[-1].slots if slot.request is not None]


def ids(h: Harness, *keys: tuple[str, int]) -> list[str]:
    """The unknown ones of these attempts."""
    return [name for name, _ in h.scheduler.unknown(keys)]


def told(h: Harness, report: StepReport) -> list[Instruction]:
    return [each for each in h.scheduler.handle(WorkerReported(report), 10.0) if not isinstance(each, SendPlan)]
