"""Predicted output lengths, and the messages that carry forecasts."""

from __future__ import annotations

from dataclasses import dataclass, replace

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The levels at which every forecast gives the output length."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A distribution of output lengths, in tokens.

    Attributes:
        mean: Expected output length.
        quantiles: Output lengths at ``QUANTILES``, not falling.
        num_samples: Finished requests behind it; 0 means that nothing is known yet and the numbers are a prior.
        source: The predictor that made it, such as ``history``.
        version: Version of the model behind it; rises when the model learns.
        rank: Orders the requests of one version, the ones expected to be short first; None: by ``mean``.
    """

    mean: float
    quantiles: tuple[float, ...]
    num_samples: int
    source: str
    version: int
    rank: float | None = None

    def within(self, limit: int) -> Forecast:
        """Returns the forecast of an output that is cut off at ``limit`` tokens: what a request is shown to expect."""
        if self.quantiles[-1] <= limit and self.mean <= limit:
            return self
        quantiles = tuple(min(length, float(limit)) for length in self.quantiles)
        return replace(self, mean=min(self.mean, float(limit)), quantiles=quantiles)


@dataclass(frozen=True, slots=True)
class CallForm:
    """Who calls, and how: the client tells more about the length of an answer than what is asked.

    Attributes:
        client: Names the client by a hash of its API key and of the ``user`` that it sends; empty without either.
        streams: Whether it reads a stream.
        has_tools: Whether it offers tools.
        has_schema: Whether the output must follow a grammar.
    """

    client: str = ""
    streams: bool = False
    has_tools: bool = False
    has_schema: bool = False


NO_CALL = CallForm()
"""Nothing is known of the call."""


@dataclass(frozen=True, slots=True)
class ForecastQuestion:
    """What is known of a request before it runs.

    Attributes:
        instruction: Text that its application sends to the model each time.
        user_input: The request's own part.
        user_input_len: Length of ``user_input``, in tokens of the served model.
        prompt_len: Length of the whole prompt, in tokens, its images included.
        max_new_tokens: Limit of the output, in tokens.
        tenant: As in ``Request``; empty where no API keys are in use.
        image_tokens: Tokens of each image of the prompt.
        call: Who calls, and how.
    """

    request_id: str
    instruction: str
    user_input: str
    user_input_len: int
    prompt_len: int
    max_new_tokens: int
    tenant: str = ""
    image_tokens: tuple[int, ...] = ()
    call: CallForm = NO_CALL

    @property
    def rest_len(self) -> int:
        """Length of what is neither user input nor image, in tokens."""
        return max(self.prompt_len - self.user_input_len - sum(self.image_tokens), 0)


@dataclass(frozen=True, slots=True)
class Example:
    """A request that ended, to learn from.

    Attributes:
        output_len: Output length in tokens.
        censored: The output was cut off, by its limit or by its client: it would have been longer.
    """

    question: ForecastQuestion
    output_len: int
    censored: bool = False


@dataclass(frozen=True, slots=True)
class StateQuestion:
    """What is known of a request after prefill.

    Attributes:
        before: The forecast that was made before prefill.
        state: As in ``TokenDelta.state``.
    """

    request_id: str
    prompt_len: int
    max_new_tokens: int
    before: Forecast
    state: bytes


@dataclass(frozen=True, slots=True)
class ForecastQuestions:
    """Ingress -> LengthPredictor: asks for forecasts of these requests, some of which have been prefilled."""

    questions: tuple[ForecastQuestion, ...]
    prefilled: tuple[StateQuestion, ...] = ()


@dataclass(frozen=True, slots=True)
class Forecasts:
    """From the LengthPredictor: one forecast for each question, in their order; of those prefilled, if there are any.

    Attributes:
        prefilled: Empty where states tell no more than what was forecast before.
    """

    forecasts: tuple[Forecast, ...]
    prefilled: tuple[Forecast, ...] = ()


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """Ingress -> Router -> Scheduler: the forecast of an attempt that was submitted before the forecast came."""

    request_id: str
    attempt: int
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ForecastsMade:
    made: tuple[ForecastMade, ...]
