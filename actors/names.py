"""How actors find each other."""

NAMESPACE = "farsight"
CONTROL = "farsight-control"
WORKER = "farsight-worker-0"
