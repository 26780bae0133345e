"""Whole engines for the tests: a tiny random model, and one or two engines stepped inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvmesh.cache.stats import CacheStats
from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.build import Engine
from kvmesh.net.clock import ManualClock, SystemClock
from kvmesh.net.doorbell import Doorbell
from kvmesh.protocol.engine import FromEngine, Generate, RequestFailed, ToEngine, TokenBatch, TokenOutput
from kvmesh.protocol.errors import unavailable
from kvmesh.protocol.sampling import SamplingParams, TokenLogprob

VOCABULARY = 96
EOS = 2
BLOCK = 4


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with logits wide enough that its greedy choices are no coin tosses."""
    return write_model(tmp_path_factory.mktemp("tiny-llama"), seed=11)


@pytest.fixture(scope="session")
def retrained_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Other weights under the same name."""
    directory = tmp_path_factory.mktemp("retrained") / tiny_model.name
    directory.mkdir()
    return write_model(directory, seed=12)


def write_model(directory: Path, seed: int) -> Path:
    hidden, ffn, heads, kv_heads, layers = 32, 64, 4, 2, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "bos_token_id": 1,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden, 4.0),
    }
    width = hidden // heads * kv_heads
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden, hidden, 2.0),
            f"{prefix}.self_attn.k_proj.weight": matrix(width, hidden, 2.0),
            f"{prefix}.self_attn.v_proj.weight": matrix(width, hidden, 2.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden, 2.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(ffn, hidden, 2.0),
            f"{prefix}.mlp.up_proj.weight": matrix(ffn, hidden, 2.0),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, ffn, 2.0),
        }
    save_file(weights, str(directory / "model.safetensors"))
    return directory


@dataclass
class Answer:
    """All that an engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenOutput | None = None
    failure: RequestFailed | None = None

    @property
    def over(self) -> bool:
        return self.failure is not None or (self.last is not None and self.last.finish_reason is not None)

    @property
    def reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason


class EngineBench:
    """One engine without a process, and the channel to it: submit, step, read the answers."""

    def __init__(self, settings: WorkerSettings, clock: SystemClock | ManualClock, epoch: int = 1) -> None:
        self.answers: dict[str, Answer] = {}
        self.messages: list[FromEngine] = []
        self.bell = Doorbell()
        """Whoever steps looks anyway."""
        self.engine = Engine.build(settings, self, epoch=epoch, clock=clock)
        self.executor = self.engine.executor
        self.plans: list[Any] = []

    def wait(self, timeout_s: float) -> bool:
        raise AssertionError("an engine that is stepped by hand never waits")

    def receive(self) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        match message:
            case TokenBatch():
                for output in message.outputs:
                    answer = self.answers.setdefault(output.request_id, Answer())
                    assert not answer.over, "output after the end"
                    answer.tokens += output.token_ids
                    answer.logprobs += output.logprobs or []
                    answer.last = output
            case RequestFailed():
                answer = self.answers.setdefault(message.request_id, Answer())
                assert not answer.over, "failure after the end"
                answer.failure = message
            case _:
                self.messages.append(message)

    def submit(self, request: Generate) -> None:
        self.answers.setdefault(request.request_id, Answer())
        self.executor.submit(request)

    def step(self) -> bool:
        outcome = self.executor.step()
        self.engine.reporter.after_step(computed=outcome.computed)
        return outcome.computed

    def run(self, *requests: Generate, steps: int = 4000) -> list[Answer]:
        """Submit and step until every one of ``requests`` is over."""
        for request in requests:
            self.submit(request)
        answers = [self.answers[request.request_id] for request in requests]
        for _ in range(steps):
            if all(answer.over for answer in answers):
                break
            self.step()
        assert all(answer.over for answer in answers), "not finished"
        return answers

    @property
    def cache(self) -> CacheStats:
        return self.engine.manager.stats()

    def check_idle(self) -> None:
        """Nothing is held, and the bookkeeping of every page is right."""
        stats = self.cache
        assert (stats.held, stats.locked, stats.quarantined, stats.open_sequences, stats.open_leases) == (0,) * 5
        assert stats.free + stats.evictable == stats.total
        self.engine.manager.check_integrity()


BenchFactory = Callable[..., EngineBench]


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[BenchFactory]:
    """Builds engines over the tiny model; ``tokens`` sizes the cache, ``cache`` goes to KvCacheConfig."""
    benches: list[EngineBench] = []

    def make(
        *,
        tokens: int = 2000,
        cache: dict[str, Any] | None = None,
        transfers: dict[str, Any] | None = None,
        clock: SystemClock | ManualClock | None = None,
        name: str = "engine",
        model: str | None = None,
        **settings: Any,
    ) -> EngineBench:
        bench = EngineBench(
            WorkerSettings(
                model=model or str(tiny_model),
                device="cpu",
                num_threads=1,
                instance_id=name,
                cluster_secret="secret",
                kv_cache_config=KvCacheConfig(**{"tokens_per_block": BLOCK, "max_tokens": tokens, **(cache or {})}),
                cache_transceiver_config=CacheTransceiverConfig(**(transfers or {})),
                **settings,
            ),
            clock or SystemClock(),
        )
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.executor.abort_all(unavailable("the test is over"))
        bench.engine.close()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., bytes]:
    """A random prompt of the tiny vocabulary: ``prompt(length, seed)``."""

    def make(length: int, seed: int = 0) -> bytes:
        return np.random.default_rng(seed).integers(3, VOCABULARY, length, dtype=np.int32).tobytes()

    return make


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Generate]:
    """``request_of(id, prompt, **)``: sampling parameters and message fields by name; greedy unless told otherwise."""

    def make(request_id: str, tokens: bytes, **fields: Any) -> Generate:
        names = set(SamplingParams.__struct_fields__)
        sampling = {name: fields.pop(name) for name in list(fields) if name in names}
        params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling})
        return Generate(request_id=request_id, prompt_token_ids=tokens, sampling=params, **fields)

    return make
