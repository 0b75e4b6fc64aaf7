"""The engine alone computes what a server is asked over HTTP."""

from __future__ import annotations

import json

from benchmarks.engine_alone import drawn_requests
from farsight.core.request import SamplingParams
from farsight.services.bench.compare import run_salt
from farsight.services.bench.targets import BodyForm, make_call
from farsight.services.bench.workloads import make_workload

VOCAB, SEED, SALT = 49_152, 5, run_salt(3, 2)


def test_its_prompts_and_seeds_are_those_of_the_load_generator() -> None:
    rows = make_workload("skewed", 12, SEED)
    form = BodyForm(temperature=0.8, top_p=0.95, seed=SEED, ignore_eos=True, vocab_size=VOCAB)
    sampling = SamplingParams(1, temperature=0.8, top_p=0.95, seed=SEED)
    for most_tokens in (None, 8):
        bodies = [json.loads(make_call(row, "m", form, SALT, most_tokens).body) for row in rows]
        sent = [(each["prompt"], each["seed"], each["max_tokens"]) for each in bodies]
        drawn = drawn_requests(rows, VOCAB, sampling, SALT, most_tokens)
        assert [(prompt, each.seed, each.max_new_tokens) for prompt, each in drawn] == sent
