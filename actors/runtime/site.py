"""One running service: what is served, and how its components are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.runtime.names import NAMESPACE
from actors.runtime.peer import Answering, PeerBook
from core.config.load import FarsightConfig


@dataclass(frozen=True, slots=True)
class Site:
    """Known to every process of the service.

    Attributes:
        config: ``model.name`` is what clients ask for.
        model_dir: Where config, weights and tokenizer lie.
        placement: ``fused`` or ``split``.
        namespace: Of Ray, where the actors have their names.
        detached: Whether the actors outlive the job that started them.
    """

    config: FarsightConfig
    model_dir: str
    placement: str
    namespace: str = NAMESPACE
    detached: bool = True

    def peers(self, local: Mapping[str, Answering] | None = None, host: str = "") -> PeerBook:
        """The other components as the process named ``host`` sees them, which has those in ``local`` itself."""
        delay_s = self.config.actors.scheduler_delay_s if host.startswith("scheduler-") else 0.0
        return PeerBook(self.placement, local, host, delay_s, self.namespace)
