"""The state machine of one replica's scheduler: mirror of the worker, selection, plans, decision trace."""
