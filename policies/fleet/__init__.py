"""The cluster's state machines: global placement, batch mode's scheduler and its central queue."""
