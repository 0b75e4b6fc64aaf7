"""Embeddings, scores and rankings over HTTP, with a small engine behind."""

from __future__ import annotations

import base64
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from farsight.core.errors import InvalidValueError
from farsight.engine.checkpoint.encoder_config import abilities_of
from farsight.services.api.backend import ModelInfo
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.engine.encoders.test_encoders import make_encoder
from tests.unit.services.api.api_support import Client, ScriptedBackend, application, client_on, ok, refusal
from tests.unit.services.api.engine_backend import EngineBackend

pytestmark = pytest.mark.torch

Open = Callable[[str], Client]


@pytest.fixture(scope="session")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("encoder", "scorer")}
    make_encoder("BertModel", found["encoder"])
    make_encoder("BertForSequenceClassification", found["scorer"], num_labels=1)
    return found | {"decoder": checkpoint} | {name: tmp_path_factory.mktemp(name) for name in ("embedder", "reranker")}


@pytest.fixture
def open_model(folders: dict[str, Path]) -> Open:
    """Opens a client on an application that serves one of the models."""

    def open_client(name: str) -> Client:
        backend = EngineBackend(folders[name])
        ready = backend.engine.worker.ready
        abilities = abilities_of(folders[name])
        backend.model = ModelInfo(name, 0, ready.max_model_len, False, ready.vocab_size, abilities=abilities)
        return client_on(application(backend, PromptEncoder(folders[name])))

    return open_client


@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_every_kind_of_input(open_model: Open, name: str) -> None:
    client = open_model(name)
    text = "w5 w6" if name == "encoder" else "hello"
    one = await ok(client, "/v1/embeddings", model=name, input=text, add_special_tokens=False)
    ids = (await ok(client, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
    expected = one["data"][0]["embedding"]
    assert math.isclose(sum(each * each for each in expected), 1, rel_tol=1e-5)
    assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] == len(ids)
    for same in ([text, text], ids, [ids, ids]):
        reply = await ok(client, "/v1/embeddings", add_special_tokens=False, input=same)
        for index, row in enumerate(reply["data"]):
            assert row["index"] == index
            np.testing.assert_allclose(row["embedding"], expected, rtol=1e-5, atol=1e-6)
    packed = await ok(client, "/v1/embeddings", input=text, encoding_format="base64", add_special_tokens=False)
    unpacked = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(unpacked, expected, rtol=1e-5, atol=1e-6)
    short = await ok(client, "/v1/embeddings", input=text, dimensions=8, add_special_tokens=False)
    np.testing.assert_allclose(
        short["data"][0]["embedding"], np.array(expected[:8]) / np.linalg.norm(expected[:8]), rtol=1e-4, atol=1e-6
    )


async def test_the_openai_library(open_model: Open) -> None:
    client = open_model("encoder")
    library = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client, max_retries=0)  # type: ignore[arg-type]
    texts = ["w5 w6", "w7", "w8 w9 w10"]
    reply = await library.embeddings.create(model="encoder", input=texts)
    direct = await ok(client, "/v1/embeddings", input=texts)
    assert [row.index for row in reply.data] == [0, 1, 2]
    for ours, theirs in zip(direct["data"], reply.data, strict=True):
        np.testing.assert_allclose(theirs.embedding, ours["embedding"], rtol=1e-6)
    with pytest.raises(openai.BadRequestError, match="encoder"):
        await library.chat.completions.create(model="encoder", messages=[{"role": "user", "content": "hi"}])


async def test_a_pair_is_scored_by_a_model_that_reads_both(open_model: Open, folders: dict[str, Path]) -> None:
    client = open_model("scorer")
    import transformers

    reference = transformers.BertForSequenceClassification.from_pretrained(folders["scorer"]).eval()

    def expected(query: int, document: int) -> float:
        ids, types = [1, query, 2, document, 2], [0, 0, 0, 1, 1]
        with torch.no_grad():
            logits = reference(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        return float(torch.sigmoid(logits[0, 0]))

    reply = await ok(client, "/v1/score", text_1="w5", text_2=["w6", "w7"])
    paired = await ok(client, "/v1/score", text_1=["w5", "w5"], text_2=["w6", "w7"])
    assert [row["score"] for row in paired["data"]] == [row["score"] for row in reply["data"]]
    assert [row["score"] for row in reply["data"]] == pytest.approx([expected(5, 6), expected(5, 7)], rel=1e-5)
    documents = ["w9", {"text": "w20"}, "w31"]
    ranked = await ok(client, "/v1/rerank", query="w5", documents=documents, top_n=2)
    scores = [expected(5, 9), expected(5, 20), expected(5, 31)]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [row["index"] for row in ranked["results"]] == best
    assert ranked["results"][0]["document"] == {"text": ["w9", "w20", "w31"][best[0]]}
    assert ranked["results"][0]["relevance_score"] == pytest.approx(scores[best[0]], rel=1e-5)
    error = await refusal(client, "/v1/embeddings", input="w5")
    assert error["code"] == "model_cannot_embed"
    assert "/v1/rerank" in error["message"]


async def test_without_a_classifier_cosines_rank(open_model: Open) -> None:
    client = open_model("encoder")
    rows = (await ok(client, "/v1/embeddings", input=["w5", "w6 w7", "w5"]))["data"]
    vectors = np.array([row["embedding"] for row in rows])
    ranked = await ok(client, "/v2/rerank", query="w5", documents=["w6 w7", "w5"], return_documents=False)
    assert [row["index"] for row in ranked["results"]] == [1, 0]
    assert ranked["results"][1]["relevance_score"] == pytest.approx(float(vectors[0] @ vectors[1]), rel=1e-5)
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1, rel=1e-5)
    assert ranked["results"][0]["document"] is None


async def test_bad_input_names_the_field(open_model: Open) -> None:
    client = open_model("encoder")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["w5", 6]}, "input[1]"),
        ("/v1/embeddings", {"input": [[5], []]}, "input[1]"),
        ("/v1/embeddings", {"input": [5, 64]}, "input[1]"),
        ("/v1/embeddings", {"input": [5] * 41}, "input"),
        ("/v1/embeddings", {"input": ["w5", "w5 " * 41]}, "input[1]"),
        ("/v1/embeddings", {"input": ["w5"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "w5", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "w5", "encoding_format": "float16"}, "encoding_format"),
        ("/v1/embeddings", {"input": "w5", "stream": True}, "stream"),
        ("/v1/score", {"text_1": ["w5", "w6"], "text_2": "w5"}, "text_1"),
        ("/v1/rerank", {"query": "w5", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "w5", "documents": []}, "documents"),
    ]
    for path, body, field in cases:
        error = await refusal(client, path, **body)
        assert error["param"] == field, (body, error)
    assert (await refusal(client, "/v1/embeddings", 404, input="w5", model="other"))["code"] == "model_not_found"
    kept = await ok(client, "/v1/embeddings", input="w5 " * 60, truncate_prompt_tokens=-1)
    assert kept["usage"]["prompt_tokens"] == 40


async def test_a_larger_body_is_read_and_a_huge_one_refused(open_model: Open) -> None:
    client = open_model("encoder")
    many = await ok(client, "/v1/embeddings", input=["w5 " * 30] * 900)
    assert len(many["data"]) == 900
    assert (await refusal(client, "/v1/embeddings", input=["w5"] * 12_000 + [7]))["param"] == "input[12000]"
    assert (await refusal(client, "/v1/embeddings", 413, input="w5 " * 400_000))["code"] == "request_too_large"


async def test_what_generates_only_says_so() -> None:
    backend = ScriptedBackend()
    client = client_on(application(backend, None))  # type: ignore[arg-type]
    error = await refusal(client, "/v1/embeddings", input="hello")
    assert error["code"] == "model_cannot_embed"
    assert not backend.calls


PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}answer{% endif %}"
)
PAIRS = [("hello world", "the quick fox"), ("hello world", "stop <query> and go"), ("x", "y")]


@pytest.fixture
def source(checkpoint: Path, tmp_path: Path) -> str:
    """The decoder with what transformers needs to read its tokenizer."""
    shutil.copytree(checkpoint, tmp_path / "source")
    (tmp_path / "source/tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}'
    )
    (tmp_path / "source/chat_template.jinja").write_text(PAIR_TEMPLATE)
    return str(tmp_path / "source")


def as_saved(modules: list[Any], kind: type, folder: Path, checkpoint: Path, **settings: Any) -> Any:
    """A model of sentence-transformers, saved by the library beside the weights of a decoder, as published ones are."""
    model = kind(modules=modules, device="cpu", **settings)
    model.save_pretrained(str(folder))
    for name in ("config.json", "model.safetensors"):  # the library drops the head
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return model


async def test_an_embedding_decoder_as_sentence_transformers_saves_it(
    open_model: Open, folders: dict[str, Path], checkpoint: Path, source: str
) -> None:
    """Pooling of the last token and length 1, as Qwen3-Embedding has them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    (Path(source) / "chat_template.jinja").unlink()  # the library would take each text for a message
    inner = Transformer(source)
    modules = [inner, Pooling(inner.get_embedding_dimension(), "lasttoken"), Normalize()]
    reference = as_saved(modules, SentenceTransformer, folders["embedder"], checkpoint)
    texts = [text for pair in PAIRS for text in pair]
    reply = await ok(open_model("embedder"), "/v1/embeddings", input=texts)
    found = np.array([row["embedding"] for row in reply["data"]])
    np.testing.assert_allclose(found, reference.encode(texts), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ids", [(7, 9), (7, None)])
async def test_a_reranking_decoder_as_sentence_transformers_saves_it(
    open_model: Open, folders: dict[str, Path], checkpoint: Path, source: str, ids: tuple[int, int | None], begins: bool
) -> None:
    """The logits of a word for yes and one for no behind a prompt of both texts, as Qwen3-Reranker has them."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    chat = {"add_generation_prompt": True} if begins else {}
    inner = Transformer(source, transformer_task="text-generation", processing_kwargs={"chat_template": chat})
    prompts: dict[str, Any] = {"prompts": {"judge": "Judge."}, "default_prompt_name": "judge"} if begins else {}
    reference = as_saved([inner, LogitScore(*ids)], CrossEncoder, folders["reranker"], checkpoint, **prompts)
    client = open_model("reranker")
    reply = await ok(client, "/v1/score", text_1=[pair[0] for pair in PAIRS], text_2=[pair[1] for pair in PAIRS])
    expected = reference.predict(PAIRS)
    np.testing.assert_allclose([row["score"] for row in reply["data"]], expected, rtol=1e-3, atol=1e-4)
    documents = [pair[1] for pair in PAIRS[:2]]
    ranked = await ok(client, "/v1/rerank", query=PAIRS[0][0], documents=documents)
    assert [row["index"] for row in ranked["results"]] == sorted((0, 1), key=lambda i: -expected[i])


def test_scores_need_tokens_of_the_vocabulary(folders: dict[str, Path], checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "modules.json").write_text('[{"type": "x.LogitScore", "path": "1"}]')
    (tmp_path / "1").mkdir()
    for told, expected in (
        ('{"true_token_id": 99999}', "below the vocabulary"),
        ('{"true_token_id": "yes"}', "integer"),
    ):
        (tmp_path / "1/config.json").write_text(told)
        with pytest.raises(InvalidValueError, match=expected):
            abilities_of(tmp_path)
