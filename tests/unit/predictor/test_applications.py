"""The forecaster by application, client and words: what it reads and learns, and whose lengths it keeps apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import CallForm, Forecast, ForecastQuestion
from farsight.predictor.applications.forest import HALF_LIFE, grow_by_application, statistics_of
from farsight.predictor.applications.grams import GRAM_BITS, NO_GRAM, NUM_GRAMS
from farsight.predictor.applications.reading import (
    GRAMS_AT,
    KINDS,
    NUM_FEATURES,
    READ_CHARS,
    SECRET_BYTES,
    form_features,
    keys_of,
    raw_features,
)
from farsight.predictor.applications.start import FOREST, GROWTH, MAX_EXAMPLES, untrained
from farsight.predictor.artefact import ArtefactError, TrainedModel, from_bytes
from farsight.predictor.history import HistoryPredictor
from farsight.predictor.learning import ContinuousLearning, PredictionOutcome
from farsight.predictor.models import check_artefact
from farsight.predictor.retraining import Sample, can_be_retrained, feature_set, retrain, retraining, samples_of, score
from farsight.predictor.shedding import Effort
from farsight.predictor.text_predictor import TextPredictor

SECRET = bytes(range(SECRET_BYTES))
LENGTHS = {"Translate:": 20, "Explain in detail:": 300}


def question(number: int, instruction: str, tenant: str = "") -> ForecastQuestion:
    return ForecastQuestion(f"r{number}", instruction, "word " * (1 + number % 9), 1 + number % 9, 14, 1000, tenant)


def asked(num: int, tenant: str = "") -> list[tuple[ForecastQuestion, int]]:
    names = list(LENGTHS)
    rng = np.random.default_rng(num)
    return [(question(i, names[i % 2], tenant), int(LENGTHS[names[i % 2]] * rng.uniform(0.9, 1.1))) for i in range(num)]


def trained(rows: Sequence[tuple[ForecastQuestion, int]]) -> TrainedModel:
    features = raw_features([each for each, _ in rows], SECRET)
    samples = [Sample(row, length) for row, (_, length) in zip(features, rows, strict=True)]
    return from_bytes(retrain(retraining(untrained("w", SECRET), samples)))


def forecasts(artefact: TrainedModel, *questions: ForecastQuestion, effort: Effort = Effort.FULL) -> list[Forecast]:
    return TextPredictor(artefact, None, HistoryPredictor()).forecast(questions, effort)


def test_untrained_it_answers_like_the_history_and_notes_what_to_learn_from() -> None:
    history = HistoryPredictor()
    history.learn([7, 9, 11])
    predictor = TextPredictor(untrained("w", SECRET), None, history)
    for effort in Effort:
        answers, features = predictor.forecast_with_features([question(1, "Translate:")], effort)
        assert answers == [history.current()]
        assert (features[0] is not None) == (effort is Effort.FULL)
    row = predictor.forecast_with_features([question(1, "Translate:")])[1][0]
    assert row is not None and row.shape == (NUM_FEATURES,)
    assert can_be_retrained(untrained("w", SECRET)) and samples_of(untrained("w", SECRET)) == []
    assert feature_set(untrained("w", SECRET)) != feature_set(untrained("other weights", SECRET))
    assert feature_set(untrained("w", SECRET)) != feature_set(untrained("w", bytes(SECRET_BYTES)))
    assert SECRET.hex() not in feature_set(untrained("w", SECRET))
    with pytest.raises(ArtefactError, match="a secret of 32 bytes"):
        TextPredictor(untrained("w", b"short"), None, HistoryPredictor())


def test_a_hundred_requests_tell_the_applications_apart() -> None:
    artefact = trained(asked(100))
    check_artefact(artefact)
    for effort in (Effort.FULL, Effort.LENGTH):
        short, long = forecasts(artefact, question(5, "Translate:"), question(5, "Explain in detail:"), effort=effort)
        assert short.mean == pytest.approx(20, rel=0.25) and long.mean == pytest.approx(300, rel=0.25)
        assert short.source == long.source == "applications" and short.version == 1
        assert short.rank is not None and long.rank is not None and short.rank < long.rank
    capped = replace(question(5, "Explain in detail:"), max_new_tokens=50)
    assert forecasts(artefact, capped)[0].quantiles[-1] <= 50


def test_an_application_is_known_by_the_opening_of_its_prompts_too() -> None:
    """A conversation's earlier turns make each instruction another one; its first words stay."""
    opening = "You are an assistant who answers in one word"
    rows = [(question(i, f"{opening}\nturn {i}"), 5) for i in range(50)] + asked(100)
    (known,) = forecasts(trained(rows), question(1, f"{opening}\nother turn"))
    assert known.quantiles[-2] < 15


def test_inputs_of_one_application_and_length_are_told_apart_by_their_form() -> None:
    """Code that is to be explained, and sentences, as long in tokens: neither length nor key differs."""
    inputs = ["if (a[1] == 2) { b += 3; }\n" * 4, "Say what you think of it. And why. " * 3]
    asked_of_one = [replace(question(0, "Explain:"), user_input=text, user_input_len=40) for text in inputs]
    rng = np.random.default_rng(3)
    rows = [(asked_of_one[i % 2], int((200, 30)[i % 2] * rng.uniform(0.9, 1.1))) for i in range(100)]
    code, prose = forecasts(trained(rows), *asked_of_one)
    assert code.mean == pytest.approx(200, rel=0.2) and prose.mean == pytest.approx(30, rel=0.2)


def test_a_form_is_the_length_and_what_kinds_of_characters_there_are() -> None:
    def form(text: str, instruction: str = "") -> list[float]:
        (row,) = form_features([replace(question(0, instruction), user_input=text)]).tolist()
        return row

    assert form("aB 1.\n(é,")[1:] == pytest.approx([1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 10, 2 / 10])
    assert form("")[1:] == [0.0] * 8 and form("", "in the instruction")[0] == 18
    assert form("a" * READ_CHARS + "\n")[:2] == [READ_CHARS + 1, 0], "what stands further back is not read"
    assert form("\ud800")[-1] == 1, "half a surrogate pair, which JSON can hold"
    assert len(set("".join(KINDS))) == sum(map(len, KINDS)), "no character is of two kinds"


def test_a_tenants_lengths_by_application_stay_its_own() -> None:
    """A question with another tenant's instruction gets the answer for an instruction that is nowhere known."""
    artefact = trained(asked(200, tenant="one"))
    own = forecasts(artefact, question(5, "Translate:", "one"), question(5, "Explain in detail:", "one"))
    assert own[0].mean < 40 and own[1].mean > 200
    foreign = forecasts(
        artefact,
        *(question(5, name, "two") for name in LENGTHS),
        question(5, "never seen", "two"),
    )
    assert foreign[0] == foreign[1] == foreign[2]
    assert foreign[2].quantiles[0] < 30 and foreign[2].quantiles[-2] > 200, "which is the law of all"


def of_client(number: int, client: str, tenant: str = "", **call: bool) -> ForecastQuestion:
    return replace(question(number, "one for all", tenant), call=CallForm(client, **call))


def test_clients_of_one_application_are_told_apart_but_not_across_tenants() -> None:
    lengths = {"short": 20, "long": 300}
    rng = np.random.default_rng(1)
    rows = [
        (of_client(i, client, "one"), int(lengths[client] * rng.uniform(0.8, 1.25)))
        for i in range(60)
        for client in lengths
    ]
    artefact = trained(rows)
    short, long = forecasts(artefact, of_client(5, "short", "one"), of_client(5, "long", "one"))
    assert short.mean == pytest.approx(20, rel=0.3) and long.mean == pytest.approx(300, rel=0.3)
    first, second = forecasts(artefact, of_client(5, "short", "two"), of_client(5, "long", "two"))
    assert first == second


def test_a_client_with_tools_or_a_stream_has_another_law_than_without() -> None:
    rng = np.random.default_rng(2)
    rows = [
        (of_client(i, "c", has_tools=bool(i % 2)), int((150, 25)[i % 2] * rng.uniform(0.8, 1.25))) for i in range(120)
    ]
    talks, calls = forecasts(trained(rows), of_client(5, "c"), of_client(5, "c", has_tools=True))
    assert talks.mean == pytest.approx(150, rel=0.25) and calls.mean == pytest.approx(25, rel=0.25)


def test_what_a_client_did_lately_counts_more() -> None:
    num = int(HALF_LIFE)
    raw = raw_features([of_client(i, "c") for i in range(3 * num)], SECRET)
    lens = np.array([100] * 2 * num + [10] * num)
    own = statistics_of(raw, lens)
    old, new = np.log1p([100.0, 10.0])
    # One half-life ago the lengths changed: half of all weight is on either side, but for the ends that do not count.
    wanted = (new * 0.5 + old * (0.5 - 0.125)) / (1 - 0.125)
    place = int(np.searchsorted(own.keys, keys_of(raw[:1], "client")[0]))
    assert own.sums[place, 1] / own.sums[place, 0] == pytest.approx(wanted, rel=0.01)
    assert own.sums[-1, 0] == len(raw), "the law of all counts each once"


ASKED = {"list": 40, "prove": 240}
"""Output lengths of requests that differ in one word, each in an application of its own."""


def worded(number: int, word: str, tenant: str = "") -> ForecastQuestion:
    rest = " ".join(f"w{number * 7 + place}" for place in range(8))
    return replace(question(number, ""), user_input=f"{word} {rest}", user_input_len=9, tenant=tenant)


def test_words_tell_how_long_the_answers_of_unknown_applications_are() -> None:
    rng = np.random.default_rng(4)
    rows = [
        (worded(2 * i + place, word, "one"), int(length * rng.uniform(0.8, 1.25)))
        for i in range(60)
        for place, (word, length) in enumerate(ASKED.items())
    ]
    artefact = trained(rows)
    short, long = forecasts(artefact, worded(9001, "list", "one"), worded(9002, "prove", "one"))
    assert short.mean < 80 and long.mean > 160
    foreign = forecasts(artefact, worded(9001, "list", "two"), worded(9001, "prove", "two"))
    assert foreign[0].mean == pytest.approx(foreign[1].mean, rel=0.2), "words of one tenant say nothing to another"


def test_words_are_kept_as_numbers_under_the_secret_and_the_tenant() -> None:
    def grams(text: str, tenant: str = "", secret: bytes = SECRET) -> list[float]:
        asked_for = replace(question(0, "Say"), user_input=text, tenant=tenant)
        (row,) = raw_features([asked_for], secret)[:, GRAMS_AT:].tolist()
        assert len(row) == NUM_GRAMS
        return [each for each in row if each != NO_GRAM]

    known = grams("Tell me of Ada")
    assert grams("tell ME of Ada") == known and len(known) == 4 + 1 + 4 + 3, "openings, instruction, words, pairs"
    assert all(each == int(each) and 0 <= each < 1 << GRAM_BITS for each in known)
    assert not set(known) & set(grams("Tell me of Ada", "other"))
    assert not set(known) & set(grams("Tell me of Ada", secret=bytes(SECRET_BYTES)))
    long = "word" + " other" * 5000
    assert len(grams(f"{long} end")) < NUM_GRAMS and grams(f"{long} end") != grams(f"{long} last")
    assert 80 < len(grams(" ".join(map(str, range(500))))) <= NUM_GRAMS
    assert grams("\ud800") == grams("\ud800"), "half a surrogate pair, which JSON can hold"


def test_a_text_with_the_key_of_another_tenants_cannot_be_searched_for() -> None:
    """The attacker knows the victim's name, its instruction and this source text, but not the secret: a text whose key
    is the victim's in 12 bits under a guessed secret has an unrelated one under the true secret."""
    bits, guessed = (1 << 12) - 1, bytes(SECRET_BYTES)

    def key(text: str, tenant: str, secret: bytes) -> int:
        return int(keys_of(raw_features([question(0, text, tenant)], secret), "instruction")[0])

    wanted = key("Translate:", "victim", guessed) & bits
    found = next(text for text in map(str, range(10**6)) if key(text, "attacker", guessed) & bits == wanted)
    assert key(found, "attacker", SECRET) & bits != key("Translate:", "victim", SECRET) & bits
    many = keys_of(raw_features([question(0, str(i)) for i in range(4000)], SECRET), "instruction")
    assert len(set(many.tolist())) == 4000, "24 bits would have collided"
    assert 1 << 61 < int(many.max()) < 1 << 63 and int(many.min()) >= 0


def test_it_serves_only_if_it_beats_the_best_history() -> None:
    """Lengths that nothing tells apart: no version may pretend to know better than their quantiles."""
    rng = np.random.default_rng(1)
    rows = raw_features([question(i, "one for all") for i in range(300)], SECRET)
    outcomes = [
        PredictionOutcome(Sample(row, int(n)), None, int(n))
        for row, n in zip(rows, rng.geometric(0.01, 300), strict=True)
    ]
    first = untrained("w", SECRET)
    learning: ContinuousLearning[Sample, TrainedModel] = ContinuousLearning(score, first, growth=GROWTH)
    learning.observe(outcomes)
    verdict = learning.learn(0.0, lambda samples: from_bytes(retrain(retraining(first, samples))))
    assert verdict is not None and not verdict.accepted and learning.current is first


def test_fits_come_with_growth_and_no_more_once_the_train_set_is_full() -> None:
    learning: ContinuousLearning[int, int] = ContinuousLearning(
        lambda model, _: float(-model), growth=GROWTH, max_examples=400, period_s=1e9
    )
    fitted = []
    for number in range(4000):
        learning.observe([PredictionOutcome(number, None, 1.0)])
        learning.learn(0.0, lambda examples: fitted.append(len(examples)) or len(fitted))  # type: ignore[func-returns-value]
        learning.check_integrity()
    assert fitted == [80, 161, 323]
    assert learning.num_examples == 400 < MAX_EXAMPLES


def test_what_is_no_row_of_features_is_refused() -> None:
    lens = np.arange(10)
    for rows in (np.zeros((10, NUM_FEATURES + 1), np.float32), np.zeros((3, NUM_FEATURES), np.float32)):
        with pytest.raises(InvalidValueError, match="features"):
            grow_by_application(rows, lens[: len(rows)], FOREST)
    artefact = trained(asked(100))
    for name in ("full.keys", "full.key_sums", "full.grams", "full.slopes"):
        damaged = {**artefact.arrays, name: artefact.arrays[name][:-1]}
        with pytest.raises(ArtefactError):
            check_artefact(TrainedModel(artefact.metadata, damaged))
