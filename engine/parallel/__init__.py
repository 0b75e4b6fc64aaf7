"""One model over several processes: tensor and pipeline parallelism, alone and mixed. Free of Ray.

``mesh`` says which rank has which part of the model, ``shards`` reads the part, ``stage`` computes it; ``exchange``
holds the data that ranks exchange in a step, and moves it. Rank 0 (``driver``) holds the worker and its
executor; the other ranks (``follower``) carry out its orders (``wire``).
"""
