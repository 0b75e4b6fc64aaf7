"""Table 2: what a question is, what a picture costs on one GPU, and what a line of the table compares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.reproduce.past_future_images import PER_IMAGE, TABLE_2, OneGpu, questions, table_2_line
from simulator.cluster.latency import GPUS, MODELS, Roofline
from simulator.traffic.lengths import Uniform


def test_questions_share_pictures_as_in_the_data() -> None:
    line = TABLE_2[0]
    asked = questions(line, 800)
    assert asked == questions(line, 800) != questions(line, 800, seed=1)
    names = [each.images[0].name for each in asked]
    assert names == sorted(names, key=int)  # questions about one picture come together
    assert PER_IMAGE < 800 / len(set(names)) < 1.6 * PER_IMAGE
    assert all(1 <= each.output_len <= line.limit and each.images[0].tokens == 256 for each in asked)
    assert all(266 <= each.prompt_len <= 280 for each in asked)


def test_a_gpu_that_also_encodes_takes_the_time_of_the_pictures() -> None:
    gpu = Roofline(GPUS["a100-80g"], MODELS["qwen-vl-7b"])
    both, token_s = OneGpu(gpu, image_share=0.5), gpu.image_cost.token_s
    assert both.step_s(1000, 3, 90) == pytest.approx(gpu.step_s(1000, 3, 90) + 500 * token_s)
    assert both.decode_run_s(3, 90, 7) == gpu.decode_run_s(3, 90, 7) and both.copy_s(9) == gpu.copy_s(9)
    assert both.image_cost.is_free and not gpu.image_cost.is_free
    assert both.cost == replace(gpu.cost, prefill_token_s=gpu.cost.prefill_token_s + token_s * 0.5)


def test_a_line_compares_with_batches_and_with_another_admission() -> None:
    small = replace(TABLE_2[1], text=Uniform(5, 9), batch_size=1)
    one, eight = table_2_line(small, 48), table_2_line(replace(small, batch_size=8), 48)
    metrics = [row.metric for row in one]
    assert metrics == [row.metric for row in eight] and len(one) == 5
    by_metric = [{row.metric: row.ours for row in rows} for rows in (one, eight)]
    ratio, again, admission = metrics[2:]
    for found in by_metric:
        assert found[ratio] == pytest.approx(found[metrics[1]] / found[metrics[0]])
        assert 1.0 < found[again] <= found[ratio]
        assert found[admission] == pytest.approx(1.0, abs=0.05)
    assert by_metric[0][ratio] > by_metric[1][ratio]  # a batch of one computes its weights for one answer alone
    assert one[2].reported is not None and one[2].reported.value == pytest.approx(851.73 / 535.31)
