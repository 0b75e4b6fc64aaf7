"""One model over several processes: tensor and pipeline parallelism, alone and mixed. Free of Ray.

``mesh`` says which rank has what, ``shards`` reads it, ``stage`` computes it; ``exchange`` is what it gives the others
and gets from them, and ``group`` moves that. Rank 0 (``driver``) holds the worker and its executor; the other ranks
(``follower``) do what it writes to them (``wire``).
"""
