"""How actors find each other."""

NAMESPACE = "farsight"
CONTROL = "farsight-control"


def worker_name(index: int) -> str:
    """The name of the worker of replica ``index``."""
    return f"farsight-worker-{index}"
